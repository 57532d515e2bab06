"""Private members of other libraries, one module per library; each function states why the public interface lacks it.

An upgrade of a library that breaks one of them is repaired here. A private member that is wrapped here is used nowhere
else (`tests/test_imports.py`). It imports no other room of the project.
"""
