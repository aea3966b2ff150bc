"""What draws in the chapters: one look, and one meaning of colour.

ranks({"before": gather("x")}, origin)   tensors on ranks: numbers in cells, colour says whose
curves({"measured": (x, y)}, ...)        lines and points over an axis
bars({"rank 0": {"parameters": 4e6}})    stacked bars
timeline({"rank 0": [Span(...)]})        who does what, when
movie(draw, frames)                      what moves: an animated picture, without scripts

Colour is ORIGIN wherever tensors are drawn: the rank whose data a number is made of. A cell that
several ranks have contributed to is striped in all their colours. COLOURS can be told apart by
readers who do not see red and green, and black text can be read on each of them.

page.py has the look and what shows a picture, charts.py and tensors.py what is drawn in it.
Pictures that belong to one chapter alone lie beside them, in a module of the chapter's name.
Each ends with show(), which refuses letters that are too small to read.
"""

from figures.charts import Span, bars, curves, panels, timeline
from figures.page import ACTIONS, COLOURS, KINDS, LINES, NOBODY, WIDTH, canvas, movie, show
from figures.tensors import arrow, box, cell, digits, ranks, tens, tensor

__all__ = [
    "ACTIONS",
    "COLOURS",
    "KINDS",
    "LINES",
    "NOBODY",
    "WIDTH",
    "Span",
    "arrow",
    "bars",
    "box",
    "canvas",
    "cell",
    "curves",
    "digits",
    "movie",
    "panels",
    "ranks",
    "show",
    "tens",
    "tensor",
    "timeline",
]
