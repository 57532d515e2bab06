"""Access to private members of other libraries, one module per library.

Each function states why the library's public interface is not enough. If an upgrade of a library breaks such access,
only this package must change: a private member that it wraps is used nowhere else (`tests/test_imports.py`). This
package imports no other package of this project.
"""
