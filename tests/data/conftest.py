"""Modules that the tests of this folder share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # scenes.py, shared by the tests of this folder
sys.path.insert(0, str(Path(__file__).parents[1]))  # s3_server.py, shared with the tests of storage
