"""Start-up hook of ``tracedstore-run``: waits for the import of torch.

Python imports a module of this name at start-up, and ``tracedstore-run`` has put this
directory first on PYTHONPATH. This module is not part of the package. Every Python
program below that command loads it, so it imports nothing. When torch is about to be
imported, and not before, it loads ``tracedstore.auto.patches``.
"""

import sys


class _TorchImportHook:
    """A meta path finder that finds nothing; it instruments torch on its import."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        if name != "torch":
            return
        sys.meta_path.remove(_TorchImportHook)
        try:
            from tracedstore.auto import patches  # noqa: PLC0415 - see the docstring

            patches.instrument()
        except ImportError:
            pass  # another Python, without tracedstore
        except Exception as error:
            sys.stderr.write(f"tracedstore: torch is not instrumented: {error!r}\n")


sys.meta_path.insert(0, _TorchImportHook)

# Import the sitecustomize that Python would have found without this one; it raises what
# it raises.
_directory = __file__.rpartition("/")[0]
sys.path[:] = [_entry for _entry in sys.path if _entry != _directory]
sys.path_importer_cache.pop(_directory, None)
del sys.modules["sitecustomize"]
__import__("sitecustomize")
