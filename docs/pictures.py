"""The picture of the README: the packaged sample as an engine that does not know its layer names would run it.

Run: ``python docs/pictures.py [FOLDER]``; it writes ``served.png`` there, by default into ``docs/images/``.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(folder: Path) -> None:
    """Writes the picture and prints its alternative text."""
    from eagle3diag import open_checkpoint, open_target, serve
    from eagle3diag.report import figures

    sample = HERE.parent / "data_samples" / "smollm2-eagle3"
    served = serve(open_checkpoint(sample / "draft"), "sglang==0.5.9", target=open_target(sample / "target"))
    (folder / "served.png").write_bytes(figures.png(figures.plot(served)))
    print(figures.alt(served))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "images")
