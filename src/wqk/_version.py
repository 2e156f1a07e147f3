"""The version, read by the build and by the package, and where the project lives."""

__version__ = "0.1.0"

# Said here once; a test compares the notebook for Colab with it.
ADDRESS = "https://github.com/OWNER/wqk"
