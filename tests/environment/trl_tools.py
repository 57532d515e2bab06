"""Write the tools that TRL finds in environments: `python trl_tools.py TOKENIZER TEMPLATE OUTPUT`, in TRL's Python.

TRL's trainer creates the environments, as for a training run. The output is JSON: for each environment, the schemas of
its tools and whether it owns its reward.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from environments_for_tests import Calculator, SelfSampled
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.chat_template = Path(sys.argv[2]).read_text()
small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **small))
trainer = GRPOTrainer(
    model,
    args=GRPOConfig(f"{sys.argv[3]}.trl", use_cpu=True, bf16=False, report_to="none"),
    train_dataset=Dataset.from_list([{"environment": "sums", "answer": 7}, {"environment": "count", "answer": 0}]),
    processing_class=tokenizer,
    environment_factory={"sums": Calculator, "count": SelfSampled},
)
tools_by_environment = {
    name: {
        "tools": [get_json_schema(tool) for tool in tools],
        "owns_reward": type(trainer._environment_pool[name][0]).__name__ in trainer.reward_func_names,
    }
    for name, tools in trainer._env_tools.items()
}
Path(sys.argv[3]).write_text(json.dumps(tools_by_environment))
