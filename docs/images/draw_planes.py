"""Draws planes.svg, the picture of nested planes and gates: `python docs/images/draw_planes.py`."""

from pathlib import Path

WIDTH, HEIGHT = 860, 500
INK, GREY, RULE = "#1b1f24", "#5b6570", "#c9d1d9"
PLANES = {"h": "#1f6f8b", "l": "#4fa3b8", "b": "#a9d3de"}
TAIL = "#efe3c8"


def text(x: float, y: float, content: str, size: int = 13, anchor: str = "start", colour: str = INK, bold=False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>{content}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="white"/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = GREY, dashes: str = "") -> str:
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"{style}/>'


def one_row() -> list[str]:
    """The bits of a channel, and what each prefix of the planes reads as."""
    left, unit, top = 130, 30, 62
    shapes = [text(20, 34, "One channel of a rotated K or V row: 16 bits in three planes", 15, bold=True)]
    start = 0
    for name, bits in (("h", 4), ("l", 4), ("b", 8)):
        shapes.append(box(left + start * unit, top, bits * unit, 34, PLANES[name]))
        colour = INK if name == "b" else "white"
        shapes.append(text(left + (start + bits / 2) * unit, top + 22, f"{name}: {bits} bits", 13, "middle", colour))
        start += bits
    readings = (("bits=4", 4, "16 h + 7.5"), ("bits=8", 8, "a = 16 h + l"), ("bits=16", 16, "a + b / 256"))
    for i, (name, bits, reading) in enumerate(readings):
        y = top + 52 + 22 * i
        shapes += [line(left, y, left + bits * unit, y), line(left + bits * unit, y - 5, left + bits * unit, y + 5)]
        shapes.append(text(left - 14, y + 4, name, 13, "end"))
        shapes.append(text(left + bits * unit + 10, y + 4, f"reads as {reading}", 13, colour=GREY))
    shapes.append(text(left, top + 122, "times e, the row's scale", 13, colour=GREY))
    return shapes


def what_is_read() -> list[str]:
    """Keys from the largest share to the smallest: how far each plane is read."""
    left, right, top, height = 130, 790, 270, 22
    # Where each plane's gate lies, as a share of the way from the largest weight to the smallest.
    gates = (("K", "h", 1.0), ("K", "l", 0.55), ("K", "b", 0.27), ("V", "h", 0.67), ("V", "l", 0.53), ("V", "b", 0.14))
    shapes = [text(20, 232, "What a step reads of each key: planes up to their gates", 15, bold=True)]
    shapes.append(text(left, 258, "largest share of the row", 12, colour=GREY))
    shapes.append(text(right, 258, "smallest", 12, "end", GREY))
    dropped = left + gates[3][2] * (right - left)  # past V.h
    shapes.append(box(dropped, top + 3 * (height + 4) + 10, right - dropped, 3 * height + 8, TAIL))
    for i, (which, plane, reach) in enumerate(gates):
        y = top + i * (height + 4) + (10 if which == "V" else 0)
        end = left + reach * (right - left)
        shapes.append(box(left, y, end - left, height, PLANES[plane]))
        shapes.append(text(left - 14, y + 16, f"{which}.{plane}", 13, "end"))
        if reach < 1:
            shapes.append(line(end, y - 2, end, y + height + 2, INK))
            label = f"gate of {which}.{plane}"
            shapes.append(text(end + 8, y + 16, label, 12, colour=GREY))
        else:
            shapes.append(
                text(left + 12, y + 16, "every key: gives its logit, and decides the rest", 12, colour="white")
            )
    bottom = top + 6 * (height + 4) + 10
    shapes.append(line(left, bottom + 6, right, bottom + 6, RULE))
    shapes.append(text(right - 10, bottom - 14, "dropped: the tail model", 12, "end"))
    shapes.append(
        text(left, bottom + 28, "The depth sets all five gates. A dropped key keeps its share in the denominator;", 13)
    )
    shapes.append(text(left, bottom + 46, "its block's mean and a correction from its K stand in for its value.", 13))
    return shapes


def drawing() -> str:
    shapes = "\n".join([*one_row(), *what_is_read()])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="DejaVu Sans, Helvetica, Arial, sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{shapes}\n</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_name("planes.svg").write_text(drawing())
