"""The HTML report is one self-contained page, escapes all text, and works in a real browser."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from headless_chromium import Chromium, chromium, find_chromium

from kvcompile.passes.notes.surroundings import Box, SiteSurroundings, Surroundings
from kvcompile.passes.refusal import Reason
from kvcompile.passes.site import CacheSummary, Site
from kvcompile.report.data import GraphReport
from kvcompile.report.origin import Origin
from kvcompile.report.report import Report

ROOT = Path(__file__).parents[2]
NUM_LAYERS = 32
EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>\"'&"


def surroundings(cache: str, write: str, attention: str) -> Surroundings:
    boxes = (
        Box(f"{cache} key cache".strip(), ("bfloat16 [1, 8, 4096, 128]",), "cache"),
        Box("input", ("int64 [1]",), "input"),
        Box("add", ("bfloat16 [1, 8, 1, 128]",), "operation"),
        Box(f"key {write}", ("index_put", "bfloat16 [1, 8, 4096, 128]"), "write"),
        Box("key read", ("unsqueeze, expand, clone, view", "bfloat16 [1, 32, 4096, 128]"), "read"),
        Box(attention, ("kvcompile.sdpa", "bfloat16 [1, 32, 1, 128]"), "attention"),
        Box("key write back", ("copy_",), "write"),
        Box("returned", (), "output"),
    )
    return Surroundings(boxes, ((0, 3), (1, 3), (2, 3), (3, 4), (4, 5), (3, 6), (0, 6), (5, 7)))


BEFORE, AFTER = surroundings("", "write", "attention"), surroundings("packed", "store", "packed attention")


def cache(role: str, layer: int, format: str, after: int) -> CacheSummary:
    source = f"L['past_key_values'].layers[{layer}].{role}s"
    return CacheSummary(role, "static", "index_put", source, (1, 8, "s27", 128), "bfloat16", format, 256, after)


def site(layer: int) -> Site:
    module = f"model.layers.{layer}.self_attn"
    if layer in (3, 17):
        source = f"L['past_key_values'].layers[{layer}].keys"
        user = "aten.sum.dim_IntList(index_put_6, [3], True, dtype = torch.float32)"
        reason = Reason.used_elsewhere.value.format(role="key", source=source, user=user)
        return Site(module, layer, "sdpa, bool mask", reason=reason, reason_code="used_elsewhere")
    if layer == NUM_LAYERS - 1:
        return Site(module, layer, "sdpa causal", reason=Reason.policy_auto.value, reason_code="policy_auto")
    keys = "turboquant_3.5bit_seed7" if layer > 1 else "int8_per_token_head"
    caches = (cache("key", layer, keys, 132), cache("value", layer, "int4_per_group_128", 68))
    return Site(module, layer, "sdpa, causal", caches)


def graph() -> GraphReport:
    sites = tuple(site(layer) for layer in range(NUM_LAYERS))
    return GraphReport(sites, tuple(SiteSurroundings(BEFORE, AFTER if each.rewritten else None) for each in sites))


REPORT = Report([graph(), graph()], ["a call ran as plain Inductor would: a view of its cache is alive"])


class Elements(HTMLParser):
    """The start tags of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    REPORT.to_html(path)
    return path


def test_the_page_loads_nothing(page: Path) -> None:
    elements = Elements(page)
    assert not {"link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in elements.found}
    references = [
        value for _, attributes in elements.found for key in ("src", "href") if (value := attributes.get(key))
    ]
    assert references
    assert all(reference.startswith("#drawing-") for reference in references)
    text = page.read_text()
    assert "http:" not in text
    assert "https:" not in text


def test_the_details_of_a_refused_site_say_what_to_do(page: Path) -> None:
    assert f"To do: {Reason.used_elsewhere.remedy}." in page.read_text()


def test_text_from_a_model_stays_text(tmp_path: Path) -> None:
    evil_cache = CacheSummary("key", EVIL, EVIL, EVIL, (EVIL,), EVIL, EVIL, 256, 132)
    box = Box(EVIL, (EVIL,), "operation")
    views = (SiteSurroundings(Surroundings((box,), ()), None), SiteSurroundings())
    sites = (Site(EVIL, 0, EVIL, (evil_cache,)), Site(EVIL, 1, EVIL, reason=EVIL, reason_code=EVIL))
    Report([GraphReport(sites, views)], [EVIL]).to_html(tmp_path / "evil.html")
    elements = Elements(tmp_path / "evil.html")
    assert len(elements.named("script")) == 1
    assert not elements.named("img")


def test_every_site_has_a_row_and_equal_drawings_are_there_once(page: Path) -> None:
    elements = Elements(page)
    rows = [row for row in elements.named("tr") if row.get("class") == "site"]
    assert [(row["data-graph"], row["data-layer"]) for row in rows] == [
        (str(number), str(layer)) for number in (1, 2) for layer in range(NUM_LAYERS)
    ]
    drawn = Counter(use["href"] for use in elements.named("use"))
    assert len(elements.named("symbol")) == len(drawn), "no drawing is unused"
    called = Counter(site.attention for graph in REPORT.graphs for site in graph.sites)
    assert sorted(drawn.values()) == sorted([*called.values(), REPORT.totals.rewritten])


def test_the_page_names_the_model_the_policy_the_versions_and_the_time(tmp_path: Path) -> None:
    origin = Origin(
        "LlamaForCausalLM", "Policy 12ab", "default: {dtype: int8}", "kvcompile 9.9", "2026-01-02 03:04", {}
    )
    report = Report([dataclasses.replace(graph(), origin=origin)])
    report.to_html(tmp_path / "report.html")
    shown = re.sub(r"<[^>]+>", "", (tmp_path / "report.html").read_text().partition("<h1>")[2].partition("<h2>")[0])
    for text in (origin.model, origin.policy, origin.policy_text, origin.versions, origin.time):
        assert text in shown


def test_the_remedy_of_a_refusal_is_in_sight(page: Path) -> None:
    before_the_table = page.read_text().partition("<table")[0]
    assert f"To do: </strong>{Reason.used_elsewhere.remedy}" in before_the_table


def test_the_drawing_before_the_rewrite_names_the_attention_that_the_model_calls(tmp_path: Path) -> None:
    marker = Surroundings((Box("attention", ("kvcompile.sdpa", "bfloat16 [1]"), "attention"),), ())
    site = Site("layers.0", 0, "sdpa, causal", reason="no", reason_code="used_elsewhere")
    Report([GraphReport((site,), (SiteSurroundings(marker, None),))]).to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "kvcompile.sdpa" not in text
    assert "sdpa, causal</text>" in text


def test_the_page_says_how_many_calls_ran_plain_and_counts_no_bytes_for_them(tmp_path: Path) -> None:
    report = Report([graph()])
    for reason in ("a view of its cache is alive", None):
        report.count_call(report.graphs[0], reason)
        report.to_html(tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text("utf-8")
        assert f"1 of {report.totals.calls} calls ran as plain Inductor would: a view of its cache is alive" in text
        assert ("times smaller" in text) == (reason is None)


def test_a_report_without_graphs_is_a_page_that_says_so(tmp_path: Path) -> None:
    Report().to_html(tmp_path / "empty.html")
    assert "<p>kvquant has found no attention in a compiled graph yet.</p>" in (tmp_path / "empty.html").read_text()
    Report(remarks=["no attention was found in Linear"]).to_html(tmp_path / "empty.html")
    assert (tmp_path / "empty.html").read_text().count("no attention was found in Linear") == 1


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        REPORT.to_html(tmp_path / "nowhere" / "report.html")


def test_script_and_style_are_installed_with_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kvcompile"]
    folder = ROOT / "kvcompile" / "report" / "page"
    names = [f"report/page/{path.name}" for path in folder.iterdir()]
    assert sorted(names) == ["report/page/filter.js", "report/page/style.css"]
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for name in names)


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("needs a Chromium: none of chromium, google-chrome is installed (Debian: apt-get install chromium)")
    with chromium(program) as started:
        yield started


SHOWN = "[...document.querySelectorAll('tr.site')].filter((row) => row.offsetParent !== null).map((row) => row.dataset)"


def shown(browser: Chromium) -> list[tuple[int, int]]:
    """(graph, layer) of the visible rows."""
    return [(int(data["graph"]), int(data["layer"])) for data in browser.run(f"{SHOWN}.map((data) => ({{...data}}))")]


def choose(browser: Chromium, control: str, value: str) -> None:
    """Choose an option with the keyboard, as a user does, so that the control sends its own events."""
    browser.run(f"document.getElementById('{control}').focus()")
    browser.run(
        f"(() => {{ const control = document.getElementById('{control}'); control.value = {json.dumps(value)};"
        " control.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_it_renders_and_logs_nothing(browser: Chromium, page: Path) -> None:
    browser.open(page)
    assert browser.run("document.querySelector('h1').textContent") == "KV caches under kvquant"
    assert len(shown(browser)) == 2 * NUM_LAYERS
    assert browser.run("document.getElementById('shown').textContent") == "64 of 64 sites"
    assert browser.run("[...document.querySelectorAll('tr.details')].every((row) => row.offsetParent === null)")
    assert browser.messages == []


def test_memory_bars_are_to_scale(browser: Chromium, page: Path) -> None:
    browser.open(page)
    before, after = (
        browser.run(f"document.querySelector('.card rect.{name}').getBoundingClientRect().width")
        for name in ("before", "after")
    )
    totals = REPORT.totals
    assert after / before == pytest.approx(totals.bytes_per_token_after / totals.bytes_per_token_before, rel=0.02)


def test_filters_by_layer_graph_outcome_and_text(browser: Chromium, page: Path) -> None:
    browser.open(page)
    choose(browser, "layer", "3")
    assert shown(browser) == [(1, 3), (2, 3)]
    choose(browser, "graph", "2")
    assert shown(browser) == [(2, 3)]
    choose(browser, "layer", "")
    for kind in ("rewritten", "skipped"):
        browser.run(f"document.querySelector('input[value=\"{kind}\"]').focus()")
        browser.press(" ", " ")
    assert shown(browser) == [(2, 3), (2, 17)]
    browser.run("document.getElementById('text').focus()")
    browser.type("LAYERS[17] sum")
    assert shown(browser) == [(2, 17)]
    assert browser.run("document.getElementById('shown').textContent") == "1 of 64 sites"
    browser.type("nonsense")
    assert shown(browser) == []
    assert browser.run("document.getElementById('none').offsetParent !== null")
    browser.run("document.getElementById('reset').focus()")
    browser.press("Enter", "\r")
    assert len(shown(browser)) == 2 * NUM_LAYERS
    assert browser.messages == []


def test_the_address_keeps_the_filter(browser: Chromium, page: Path) -> None:
    browser.open(page)
    choose(browser, "layer", "17")
    choose(browser, "graph", "1")
    fragment = browser.run("location.hash")
    browser.open(page, fragment=fragment)
    assert shown(browser) == [(1, 17)]
    browser.open(page, fragment="#layer=999&without=refused")
    assert len(shown(browser)) == 2 * (NUM_LAYERS - 2)


def test_the_keyboard_opens_details_with_drawings(browser: Chromium, page: Path) -> None:
    browser.open(page, fragment="#layer=0&graph=1")
    browser.run("document.getElementById('reset').focus()")
    browser.press("Tab")
    assert browser.run("document.activeElement.getAttribute('aria-label')") == "Details of model.layers.0.self_attn"
    browser.press("Enter", "\r")
    assert browser.run("document.activeElement.getAttribute('aria-expanded')") == "true"
    drawings = browser.run(
        "[...document.querySelectorAll('figure svg')].filter((svg) => svg.checkVisibility())"
        ".map((svg) => [svg.getBoundingClientRect().width, svg.getBoundingClientRect().height])"
    )
    assert len(drawings) == 2
    assert all(width > 400 and height > 100 for width, height in drawings)
    browser.press("Tab")
    assert browser.run("document.activeElement.getAttribute('aria-label')") == "Before the rewrite, drawing"
    names = {
        node["name"]["value"]: node.get("description", {}).get("value", "")
        for node in browser.call("Accessibility.getFullAXTree")["nodes"]
        if node.get("role", {}).get("value") in ("image", "img")
    }
    assert "packed attention (kvcompile.sdpa; bfloat16 [1, 32, 1, 128]) uses key read" in names["After the rewrite"]


CONTRASTS = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (color) => rgba(color).slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const background = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (rgba(color)[3] === 255) return color;
    }
    return 'white';
  };
  const contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const found = [];
  for (const element of document.querySelectorAll('main *')) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
    if (!element.checkVisibility()) continue;
    found.push([contrast(getComputedStyle(element).color, background(element)), element.outerHTML.slice(0, 60)]);
  }
  for (const box of document.querySelectorAll('symbol .box')) {
    const back = getComputedStyle(box.querySelector('rect')).fill;
    for (const text of box.querySelectorAll('text')) {
      found.push([contrast(getComputedStyle(text).fill, back), text.outerHTML.slice(0, 60)]);
    }
  }
  return found;
})()
"""


@pytest.mark.parametrize("width", [360, 1000, 1100, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_readable_at_every_width_and_in_light_and_dark(
    browser: Chromium, page: Path, dark: bool, width: int
) -> None:
    browser.open(page, width=width, dark=dark)
    browser.run("document.querySelectorAll('.toggle').forEach((toggle, i) => { if (i < 4) toggle.click(); })")
    scrolled = browser.run("document.scrollingElement.scrollWidth")
    assert scrolled <= width, "nothing but the drawings scrolls sideways"
    contrasts: list[list[Any]] = browser.run(CONTRASTS)
    assert len(contrasts) > 200
    assert [element for ratio, element in contrasts if ratio < 4.5] == []
    backgrounds = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, backgrounds[4:-1].split(","))) < 384) == dark
    assert browser.messages == []


def test_names_from_a_model_do_not_run(browser: Chromium, tmp_path: Path) -> None:
    sites = (Site(EVIL, 0, EVIL, reason=EVIL, reason_code=EVIL),)
    view = SiteSurroundings(Surroundings((Box(EVIL, (EVIL,), "operation"),), ()))
    Report([GraphReport(sites, (view,))], [EVIL]).to_html(tmp_path / "evil.html")
    browser.open(tmp_path / "evil.html")
    assert browser.run("document.querySelector('td .name').textContent") == EVIL
    assert browser.run("window.pwned") is None
    assert browser.messages == []


def test_a_script_that_is_not_ours_is_blocked(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.run("document.body.appendChild(Object.assign(document.createElement('script'), {text: 'pwned = 1'}))")
    assert browser.run("window.pwned") is None
    assert any("Content Security Policy" in message for message in browser.messages)
