"""What ``tracedstore-run`` lets every Python process do first: wait for torch.

Python imports a module of this name while it starts, and `tracedstore-run` has put
this one's folder first on PYTHONPATH. It is not part of the package, is loaded by all
Python programs below that command, and therefore imports nothing. When torch is about
to be imported, and not before, it loads ``tracedstore.auto.patches``.
"""

import sys


class _UntilTorch:
    """Waits for torch to be imported; finds no module itself."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        if name != "torch":
            return
        sys.meta_path.remove(_UntilTorch)
        try:
            from tracedstore.auto import patches  # noqa: PLC0415 - see above

            patches.instrument()
        except ImportError:
            pass  # another Python, which has no tracedstore
        except Exception as error:
            sys.stderr.write(f"tracedstore: nothing is traced: {error!r}\n")


sys.meta_path.insert(0, _UntilTorch)

# From here on as if this module were not there: the sitecustomize that Python would
# have found is imported by Python's own rules, and raises what it raises.
_here = __file__.rpartition("/")[0]
sys.path[:] = [_folder for _folder in sys.path if _folder != _here]
sys.path_importer_cache.pop(_here, None)
del sys.modules["sitecustomize"]
__import__("sitecustomize")
