"""The version, read by the build and by the package, and the addresses of the project."""

__version__ = "0.1.0"

# Said here once; a test compares the notebook for Colab with it.
ADDRESS = "https://github.com/OWNER/wqk"
