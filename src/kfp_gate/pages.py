"""Self-contained HTML pages: one frame, one style, no script or font from outside.

Everything is escaped by jinja2's autoescape; figures are inline SVG drawn by the macros in
`templates/figures.html`, so that they follow the page's colours in light and dark mode and in print. The one
script of a page (`templates/page.js`: sorting and filtering tables) is allowed by its hash; no other runs.
"""

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_SCRIPT = files("kfp_gate").joinpath("templates/page.js").read_text(encoding="utf-8")

_environment = Environment(
    loader=PackageLoader("kfp_gate"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_environment.globals.update(
    page_script=Markup(_SCRIPT),  # noqa: S704  # our own constant file, never a user's text
    page_script_hash=f"sha256-{b64encode(sha256(_SCRIPT.encode()).digest()).decode()}",
)


def render(template: str, **values: Any) -> str:
    """The page made of `templates/<template>`, which extends `page.html`.

    Figures: `{% import "figures.html" as figures %}`; the head of that file lists the macros. Tables: class
    `sortable` makes the headings sort (by `data-sort` where a cell has one); wrap wide tables in `.scroll`.
    """
    return _environment.get_template(template).render(**values)
