"""Policy of a run: any causal language model of transformers, and its head, which is applied separately.

`load` loads models and tokenizers; `gguf` converts files of llama.cpp to ones that `load` reads. `policy` scores
tokens; `packed`, `shared_prompt` and `chunked_head` make that cheaper with the same result. `chat` renders prompts,
`save` exports.

May import: `axes` and the modules of the lowest layer in tests/test_imports.py (`checks`, `rollouts`, ...).
"""
