"""Self-contained HTML pages: one frame, one style, no script or font from outside.

Everything is escaped by jinja2's autoescape; figures are inline SVG drawn by the macros in
`templates/figures.html`, so that they follow the page's colours in light and dark mode and in print.
"""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_environment = Environment(
    loader=PackageLoader("kfp_gate"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def render(template: str, **values: Any) -> str:
    """The page made of `templates/<template>`, which extends `page.html`."""
    return _environment.get_template(template).render(**values)
