"""The colours of the pages' light and dark themes."""

import io
from collections.abc import Mapping
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.colors import is_color_like, to_hex, to_rgba
from matplotlib.figure import Figure

from . import figures

SHADES: Mapping[str, Mapping[str, str]] = {
    "light": {
        **{"page": "#ffffff", "raised": "#f6f7f8", "ink": "#16191d", "muted": "#5a626c", "line": "#dfe3e7"},
        **{"rule": "#e4e7ea", "control": "#626b76", "link": "#0a5fb0", "good": "#00704f", "bad": "#b3261e"},
        **{f"c{index}": color for index, color in enumerate(figures.LIGHT)},
    },
    "dark": {
        **{"page": "#14171a", "raised": "#1f2428", "ink": "#e9ecef", "muted": "#a4adb7", "line": "#343b42"},
        **{"rule": "#2a3036", "control": "#98a2ad", "link": "#7cbcff", "good": "#4fd1a1", "bad": "#ff8a80"},
        **{f"c{index}": color for index, color in enumerate(figures.DARK)},
    },
}


def palette() -> dict[str, Markup]:
    """The CSS declarations of both themes, in braces."""
    found = {}
    for theme, shades in SHADES.items():
        found[theme] = Markup("{" + ";".join(f"--{name}:{value}" for name, value in shades.items()) + "}")
    return found


def plain_figure(figure: Figure, format: str) -> bytes:
    """A figure that was drawn with placeholders in the light theme's colours. format: svg, pdf or png."""
    colours = {place: SHADES["light"][name.removeprefix("--")] for place, name in figures.VARIABLES.items()}
    colours |= {f"#0a00{index:02x}": colour for index, colour in enumerate(figures.LIGHT)}
    for artist in figure.findobj():
        for part in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            value: Any = getattr(artist, f"get_{part}", lambda: None)()
            if is_color_like(value) and to_hex(value) in colours:
                getattr(artist, f"set_{part}")(to_rgba(colours[to_hex(value)], to_rgba(value)[3]))
    out = io.BytesIO()
    with matplotlib.rc_context(figures.STYLE):
        metadata = {"Date": None} if format == "svg" else {"CreationDate": None} if format == "pdf" else {}
        figure.savefig(out, format=format, dpi=200, metadata=metadata)
    return out.getvalue()


def follow_scheme(svg: str) -> str:
    """An SVG in the light theme's colours that takes the dark theme's where the reader's system is dark.

    Viewers that know no media queries show the light one. Colours that are not the light theme's stay.
    """
    light, dark = SHADES["light"], SHADES["dark"]
    rules = "\n".join(
        f'[style*="{part}: {light[name]}"] {{{part}: {dark[name]} !important}}'
        for name in light
        for part in ("fill", "stroke")
    )
    return svg.replace("</style>", f"\n@media (prefers-color-scheme: dark) {{\n{rules}\n}}</style>", 1)
