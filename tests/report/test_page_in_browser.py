"""The report in a real browser, from file://, light and dark, on the screen of a laptop."""

from pathlib import Path

import pytest

from tests.report.browser import CHROMIUM, DRIVER, Browser
from tests.report.samples import sample
from tests.report.test_page import HOSTILE, hostile
from thinwire.report.page import write_page

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)",
)

DRAWN = """
return [...document.querySelectorAll('.plot')].filter(p => p.offsetParent !== null)
  .map(p => [p.id, p.querySelectorAll('.main-svg').length > 0, p.clientWidth])
"""
# The contrast of text and background, by the formula of WCAG 2.
CONTRAST = """
const luminance = text => {
  const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const paper = luminance(getComputedStyle(document.body).backgroundColor);
const found = {};
for (const place of ['body', '.note', 'th', 'td', 'nav button', '.plot .xtick text',
                     '.plot .legendtext', '.plot .ytick text']) {
  const element = document.querySelector(place), style = getComputedStyle(element);
  const ink = luminance(element.closest('svg') ? style.fill : style.color);
  found[place] = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
}
return found;
"""


def test_the_report_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(sample(), path)
    with Browser(1366, 768) as browser:
        browser.open(path)
        pictures = {}
        for theme in ("light", "dark"):
            browser.theme(theme)
            drawn = browser.run(DRAWN)
            names = [name for name, _, _ in drawn]
            assert names == ["time-0", "bytes-0", "speed-0", "timeline-0"]
            assert all(there and width > 800 for _, there, width in drawn)
            for place, contrast in browser.run(CONTRAST).items():
                assert contrast >= 4.5, f"{place} in the {theme} theme: {contrast:.2f}"
            pictures[theme] = browser.screenshot(tmp_path / f"{theme}.png")
        assert pictures["light"] != pictures["dark"]
        browser.run("document.querySelector('nav button[value=\"1\"]').click()")
        browser.wait_until_drawn("dark")
        assert next(name for name, there, _ in browser.run(DRAWN) if there) == "time-1"
        wide = browser.run("return document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, "the page must not scroll sideways"
        assert browser.errors() == []


INJECTED = """
const script = document.createElement('script');
script.textContent = 'window.ran = true';
document.body.append(script);
return [Boolean(window.ran), document.querySelectorAll('a').length];
"""
BUTTONS = "return [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)"
LEGEND = "return [...document.querySelectorAll('#time-0 .legendtext')].map(t => t.textContent)"


def test_names_that_are_meant_to_do_something(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(hostile(), path)
    with Browser(1366, 768) as browser:
        browser.open(path)
        for theme in ("light", "dark"):
            browser.theme(theme)
            assert all(there for _, there, _ in browser.run(DRAWN))
            assert set(HOSTILE) <= set(browser.run(LEGEND)), "shown as they are"
        buttons = browser.run(BUTTONS)
        assert "Zoom in" in buttons
        assert not [name for name in buttons if "hare" in name or "loud" in name]
        assert browser.errors() == []
        ran, links = browser.run(INJECTED)
        assert not ran, "a script that came from elsewhere"
        assert links == 0
        assert any("Content Security Policy" in error for error in browser.errors())
