"""The report as text: whole, on its own, and honest about what did not run."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.report.samples import METHODS, sample
from thinwire.report.comparison import Comparison
from thinwire.report.figures import figures, label, style
from thinwire.report.page import findings, page, write_page


@pytest.fixture(scope="module")
def html() -> str:
    return page(sample())


def test_it_needs_nothing_from_elsewhere(html: str) -> None:
    frame = html.split("<script>")[0] + html.rpartition("</script>")[0].rpartition("<script>")[2]
    assert not re.search(r"""(src|href|@import|url\()\s*=?\s*["']?(https?:)?//""", frame)
    assert "{{" not in frame
    assert "Plotly" in html  # the library itself
    assert len(html) > 3_000_000


def test_what_users_wrote_is_shown_and_not_run(html: str) -> None:
    assert "power&lt;sgd&gt;" in html
    assert "A &amp; B &lt;5 GHz&gt;" in html
    data = re.search(r'id="figures">(.*?)</script>', html, re.S)
    assert data is not None
    assert json.loads(data[1]).keys() == figures(sample()).keys()
    assert "could not run: RuntimeError: &lt;gloo&gt; has gone" in html


HOSTILE = ["<!--<script>", "</script><script>alert(1)</script>", '<a href="https://x.org">%{x}']


def hostile() -> Comparison:
    """Methods whose names are meant to do something."""
    comparison = sample()
    names = dict(zip(METHODS[2:5], HOSTILE, strict=True))
    comparison.methods = [names.get(name, name) for name in METHODS]
    for cell in comparison.cells:
        cell.method = names.get(cell.method, cell.method)
    return comparison


def test_a_name_cannot_swallow_the_code_that_draws() -> None:
    html = page(hostile())
    data = re.search(r'id="figures">(.*?)</script>', html, re.S)
    assert data is not None
    assert "<" not in data[1]
    shown = json.loads(data[1])["time-0"]["data"]
    assert "&lt;!--&lt;script&gt;" in {trace["name"] for trace in shown}
    assert label("<b>%{x} & @0") == "&lt;b&gt;%&#123;x} &amp; &#64;0"
    for name in HOSTILE:
        assert name not in html


def test_only_the_scripts_of_the_page_may_run(html: str) -> None:
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', html)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["default-src"] == "'none'"
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    digests = [hashlib.sha256(text.encode()).digest() for text in scripts]
    assert rules["script-src"].split() == [
        f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests
    ]
    assert len(scripts) == 2
    assert "\r" not in html
    assert html.index("Content-Security-Policy") < html.index("<script")


def test_the_answer_comes_first() -> None:
    assert findings(sample()) == [
        "100mbit: overlapped reached ddp's loss 3.5 times as soon, at 97% of the speed of compute "
        "alone.",
        "10mbit: overlapped reached ddp's loss 3.5 times as soon, at 97% of the speed of compute "
        "alone.",
    ]
    slower = sample(["100mbit"])
    for cell in slower.cells:
        cell.sooner = None if cell.sooner is None else 0.5
    assert findings(slower) == ["100mbit: nothing reached ddp's loss sooner than itself."]
    without = sample(["100mbit"])
    without.baseline = None
    for cell in without.cells:
        cell.sooner = None
    assert findings(without) == ["100mbit: overlapped keeps 97% of the speed of compute alone."]


def test_a_method_keeps_its_colour() -> None:
    comparison = sample()
    colours = {name: style(comparison, name) for name in METHODS}
    assert len(set(colours.values())) == len(METHODS)
    comparison.methods = [f"m{number}" for number in range(25)]
    assert len({style(comparison, name) for name in comparison.methods}) == 25


def traces(name: str) -> list[dict[str, Any]]:
    return figures(sample())[name]["data"]


def test_curves_and_limits() -> None:
    by_time = {trace["name"]: trace for trace in traces("time-0")}
    assert set(by_time) == set(METHODS[:5])
    assert by_time["ddp"]["x"][-1] == pytest.approx(40.0)
    assert "none" not in {trace["name"] for trace in traces("bytes-0")}  # it sends nothing
    speed = {trace.get("name", "bars"): trace for trace in traces("speed-0")}
    assert "compute alone" in speed
    assert dict(zip(speed["bars"]["y"], speed["bars"]["x"], strict=True))["ddp"] == 250
    limits = speed["bytes over bandwidth, off to the right"]
    assert "overlapped" in limits["y"]


def test_the_timeline_tells_waiting_from_flying() -> None:
    by_name = {trace["name"]: trace for trace in traces("timeline-0")}
    assert set(by_name) == {"compute", "exposed: waiting", "in the air"}
    assert set(by_name["exposed: waiting"]["customdata"]) == {"ddp"}
    assert "overlapped" in by_name["in the air"]["customdata"]
    span = figures(sample())["timeline-0"]["layout"]["xaxis"]["range"][1]
    for trace in by_name.values():
        ends = [a + b for a, b in zip(trace["base"], trace["x"], strict=True)]
        assert max(ends) <= span + 1e-6


def test_nothing_measured_yet_is_no_error(tmp_path: Path) -> None:
    empty = sample(["100mbit"])
    empty.cells = []
    empty.target = None
    write_page(empty, tmp_path / "report.html")
    assert "What 4 hosts" in (tmp_path / "report.html").read_text()
