"""In the place of setuptools while pip downloads a source package; see `build_meta.py`."""
