"""Getting the upstream library ready: before its first import, since it reads the environment only once.

Without this it looks for a network at import, installs packages at run time, fetches a font, and shares a
settings file between ranks.
"""

import os
import shutil
from pathlib import Path

from kfp_gate.training.ranks import Ranks

FONTS = ("Arial.ttf", "Arial.Unicode.ttf")
TRACKERS = ("mlflow", "clearml", "comet", "dvc", "hub", "neptune", "raytune", "tensorboard", "wandb", "sync")


def prepare(private: Path, ranks: Ranks) -> None:
    """Set every switch; call it before anything imports the upstream library.

    Args:
        private: a folder of this rank alone; settings and fonts go there.
        ranks: who we are. Upstream reads RANK and LOCAL_RANK once at import, and only if WORLD_SIZE > 1.
    """
    os.environ.update(YOLO_OFFLINE="1", YOLO_AUTOINSTALL="0", YOLO_CONFIG_DIR=str(private))
    # Weights are pickles: only what a detector needs may be built from one, even from a base model of one's own.
    os.environ.setdefault("ULTRALYTICS_SAFE_LOAD", "1")
    os.environ.setdefault("YOLO_VERBOSE", "0")
    os.environ.setdefault("ULTRALYTICS_PLATFORM_URL", "http://127.0.0.1:9")
    if ranks.world_size > 1:
        os.environ.update(
            RANK=str(ranks.rank), WORLD_SIZE=str(ranks.world_size), LOCAL_RANK=str(ranks.local_rank),
            MASTER_ADDR=ranks.address, MASTER_PORT=str(ranks.port),
        )  # fmt: skip
    else:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
    folder = private / "Ultralytics"
    folder.mkdir(parents=True, exist_ok=True)
    _fonts(folder)


def settle() -> None:
    """Turn upstream's own trackers off; imports the library."""
    from ultralytics.utils import SETTINGS

    SETTINGS.update({name: False for name in TRACKERS if name in SETTINGS})


def _fonts(folder: Path) -> None:
    # Upstream downloads these even with plots off; any TrueType file satisfies it.
    if all((folder / name).is_file() for name in FONTS):
        return
    from matplotlib import get_data_path

    source = Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    for name in FONTS:
        shutil.copyfile(source, folder / name)
