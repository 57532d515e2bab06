"""The documentation site, built from the pages of this repository and from its code; `make docs` builds and serves it.

    pages of docs/, README.md, CONTRIBUTING.md ...  --stage.py-->  build/docs/pages
    argparse, conf/, docstrings                     --generate.py->  build/docs/pages
    mkdocs.yml                                      --stage.py-->  build/docs/mkdocs.yml, its navigation complete
                                                    --Zensical-->  build/docs/site

The pages stay plain Markdown with relative links, so they can also be read on a code host.
"""
