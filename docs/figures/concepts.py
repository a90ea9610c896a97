"""Draw the figures of docs/concepts.md and docs/training.md as SVG, for light and dark pages.

python docs/figures/concepts.py    # writes every file of FIGURES
"""

from pathlib import Path

WIDTH = 520
VERSIONS = ("#2f6fde", "#c2560c", "#2b8553", "#8250df")  # legible under white text
STYLE = """
.card { fill: #ffffff; stroke: #d0d7de }
text { font: 13px system-ui, sans-serif; fill: #24292f }
.soft { fill: #57606a }
.on { fill: #ffffff; font-size: 12px }
.line { stroke: #57606a; fill: none }
.band { fill: #57606a; fill-opacity: 0.15 }
@media (prefers-color-scheme: dark) {
  .card { fill: #161b22; stroke: #30363d }
  text { fill: #e6edf3 }
  .soft { fill: #9da7b1 }
  .on { fill: #ffffff }
  .line { stroke: #9da7b1 }
  .band { fill: #9da7b1 }
}
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return words at a point."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def bar(x: float, y: float, width: float, height: float, version: int, words: str = "") -> str:
    """Return a bar in the color of a version, with words in its middle."""
    color = VERSIONS[version]
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{color}"/>'
    )
    return shape + (text(x + width / 2, y + height - 4, words, "on", "middle") if words else "")


def line(points: list[tuple[float, float]], dashed: bool = False) -> str:
    """Return a line through points."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<polyline points="{path}" class="line"{dash}/>'


def picture(title: str, height: int, parts: list[str]) -> str:
    """Return a figure of `height` pixels, on a card of its own."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="6"/>',
            *parts,
            "</svg>\n",
        ]
    )


def versions() -> str:
    """Draw training steps, pushes, and requests whose segments have the color of their version."""
    pushes = [190, 310, 410]
    edges = [80, *pushes, 505]
    parts = [text(12, 42, "trainer"), text(12, 92, "requests")]
    for step, (start, end) in enumerate(zip([80, 196, 316], pushes)):
        begin = start + (60 if step == 0 else 6)
        parts.append(bar(begin, 28, end - begin - 4, 20, step + 1, f"step {step + 1}"))
    for push, x in enumerate(pushes):
        parts.append(line([(x, 22), (x, 206)], dashed=True))
        parts.append(text(x, 17, f"push {push + 1}", "soft", "middle"))
    requests = [(84, 150), (84, 255), (100, 178), (158, 396), (186, 300), (262, 470), (318, 500)]
    for row, (start, end) in enumerate(requests):
        for version, (left, right) in enumerate(zip(edges, edges[1:])):
            x, stop = max(start, left + 2), min(end, right - 2)
            if stop > x:
                width = stop - x
                parts.append(
                    bar(x, 62 + 20 * row, width, 16, version, f"v{version}" if width > 26 else "")
                )
    parts.append(text(80, 224, "time", "soft"))
    parts.append(line([(112, 220), (500, 220), (494, 216), (500, 220), (494, 224)]))
    return picture("Requests continue through pushes; each segment has one version", 236, parts)


def staleness() -> str:
    """Draw how many groups may have started and how many are trained, at each version."""
    eta, steps, left, bottom, wide, high = 2, 6, 60, 232, 72, 22

    def stairs(offset: int) -> list[tuple[float, float]]:
        levels = [(v, bottom - high * (v + offset)) for v in range(steps)]
        return [(left + wide * (v + side), y) for v, y in levels for side in (0, 1)]

    limit, used = stairs(eta + 1), stairs(0)
    band = " ".join(f"{x:g},{y:g}" for x, y in [*limit, *reversed(used)])
    parts = [f'<polygon points="{band}" class="band"/>', line(limit), line(used)]
    for version in range(steps):
        x = left + wide * (version + 0.5)
        parts.append(text(x, bottom + 20, str(version), "soft", "middle"))
    parts.append(text(left + wide * steps / 2, bottom + 40, "version", "soft", "middle"))
    parts.append(text(12, 24, "batches of B groups", "soft"))
    for level in range(0, steps + eta + 1, 2):
        parts.append(text(left - 8, bottom - high * level + 4, str(level), "soft", "end"))
    parts.append(text(left + wide * 2.4, 96, "may have started", "", "end"))
    parts.append(text(left + wide * 5.9, 188, "trained on", "", "end"))
    return picture("At staleness bound 2, three batches at most are ahead", 284, parts)


def decoupled() -> str:
    """Draw the clip ranges around the behavior and the proximal probability of a token."""
    behavior, proximal, current = 0.20, 0.30, 0.33

    def place(probability: float) -> float:
        return 30 + (probability - 0.12) * 1700

    parts = []
    rows = (
        (52, behavior, "naive PPO: around p_behav"),
        (116, proximal, "decoupled: around p_prox"),
    )
    for y, center, words in rows:
        low, high = place(0.8 * center), place(1.2 * center)
        parts.append(f'<rect class="band" x="{low:g}" y="{y}" width="{high - low:g}" height="26"/>')
        parts.append(line([(place(center), y), (place(center), y + 26)]))
        parts.append(text(low, y - 8, words))
    parts.append(line([(30, 168), (500, 168)]))
    for version, (name, value) in enumerate(
        {"p_behav": behavior, "p_prox": proximal, "p_θ": current}.items()
    ):
        x = place(value)
        parts.append(f'<circle cx="{x:g}" cy="168" r="5" fill="{VERSIONS[version]}"/>')
        parts.append(text(x, 190, name, "", "middle"))
        parts.append(text(x, 208, f"{value:.2f}", "soft", "middle"))
    parts.append(line([(place(current), 44), (place(current), 162)], dashed=True))
    return picture("The current probability is outside the naive range", 222, parts)


def prefixes() -> str:
    """Draw sequences that begin alike: tokens of the batch, and the tokens that are computed."""
    sequences = [  # of each part, where it stands: (start, end, color, words, computed before)
        [(0, 120, 0, "prompt", False), (120, 200, 1, "answer 1", False)],
        [(0, 120, 0, "prompt", True), (120, 190, 2, "answer 2", False)],
        [(0, 120, 0, "prompt", True), (120, 146, 2, "", True), (146, 222, 3, "answer 3", False)],
    ]
    parts = [text(14, 24, "in the batch"), text(276, 24, "computed")]
    for row, pieces in enumerate(sequences):
        y = 38 + 30 * row
        for start, end, color, words, known in pieces:
            parts.append(bar(14 + start, y, end - start - 2, 20, color, words))
            if not known:
                parts.append(bar(276 + start, y, end - start - 2, 20, color, words))
    # From the last shared token to what follows it.
    for place, above, row in ((120, 58, 1), (146, 88, 2)):
        x, y = 276 + place - 8, 48 + 30 * row
        parts.append(line([(x, above), (x, y), (x + 6, y)]))
    return picture("Tokens with which sequences begin alike are computed once", 140, parts)


FIGURES = {
    "versions.svg": versions,
    "staleness.svg": staleness,
    "decoupled.svg": decoupled,
    "prefixes.svg": prefixes,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        Path(__file__).with_name(name).write_text(draw())
