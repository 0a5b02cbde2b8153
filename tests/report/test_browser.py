"""The page in Chromium: nothing runs, nothing is requested, and the viewer can be used."""

import json
from contextlib import contextmanager

import pytest

import penstock as ps
from penstock.inspect import inspect_step, open_run
from penstock.report import ReportServer, open_subject, write_report

KEYS = {"right": "\ue014", "down": "\ue015", "end": "\ue010", "home": "\ue011", "tab": "\ue004"}
VISIBLE = "return document.querySelector(arguments[0]).textContent"


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    """The report of the run, as a URL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return write_report("run", tmp_path_factory.mktemp("page") / "report.html").as_uri()


@contextmanager
def opened(browser, url):
    """Open a page; at the end, fail if it logged anything, or asked any other server."""
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(url)
    yield browser
    assert browser.get_log("browser") == []
    own = url.rpartition("/")[0]
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked = message["params"]["request"]["url"]
            assert asked == url or asked.startswith(("data:", own + "/")), asked


def wait_for(browser, condition):
    """Wait until an expression of JavaScript is true."""
    script = """
        const done = arguments[arguments.length - 1], until = Date.now() + 25000;
        (function look() {
          if (%s) done(true); else if (Date.now() > until) done(false); else setTimeout(look, 20);
        })();
    """
    assert browser.execute_async_script(script % condition), condition


def texts(browser, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
    return browser.execute_script(script, selector)


def choose(browser, selector, index):
    """Choose an option as a user does: with an event."""
    script = """
        const found = document.querySelector(arguments[0]);
        found.selectedIndex = arguments[1];
        found.dispatchEvent(new Event("change", {bubbles: true}));
    """
    browser.execute_script(script, selector, index)


def test_a_page_in_a_file_logs_nothing_and_requests_nothing(browser, page):
    with opened(browser, page):
        assert texts(browser, "h2") == [
            "Run",
            "Loss",
            "Steps",
            "Mixture",
            "Packing",
            "Shuffle",
            "Corpus",
            "Documents",
        ]
        assert len(texts(browser, "#steps .tokens span")) > 20
        assert browser.execute_script("return document.scripts.length") == 3  # two hold data
        assert browser.execute_script("return document.querySelectorAll('main').length") == 1


def test_the_viewer_shows_the_tokens_of_the_step_that_is_chosen_by_mouse(browser, page, here):
    run = open_run("run")
    with opened(browser, page):
        for number, step in enumerate([1, 3, 5]):
            label = f"step {step}, loss {run.metrics[step]['loss']:.4f}"
            index = texts(browser, "#steps .item option").index(label)
            choose(browser, "#steps .item", index)
            choose(browser, "#steps .row", number)
            row = inspect_step(run.plan, run.steps, step).rows[number]
            assert f"position {row.position:,}:" in browser.execute_script(
                VISIBLE, "#steps .row-title"
            )
            ids = []
            for span in browser.find_elements("css selector", "#steps .tokens span")[:3]:
                span.click()
                shown = browser.execute_script(VISIBLE, "#steps .detail")
                ids += map(int, shown.partition(" · id ")[2].partition(" · ")[0].split())
            assert ids == row.tokens[: len(ids)]
        before = browser.execute_script(VISIBLE, "#steps .row-title")
        browser.find_element("css selector", "#steps .previous").click()
        assert browser.execute_script(VISIBLE, "#steps .row-title") != before


def test_the_viewer_can_be_used_with_the_keyboard_alone(browser, page):
    with opened(browser, page):
        tokens = browser.find_element("css selector", "#steps .tokens")
        count = len(texts(browser, "#steps .tokens span"))

        def selected():
            return tokens.get_attribute("aria-activedescendant")

        browser.execute_script("document.querySelector('#steps .next').focus()")
        for _ in range(2):  # from the button to the rows, and to the tokens
            browser.switch_to.active_element.send_keys(KEYS["tab"])
        assert browser.switch_to.active_element == tokens
        outline = "return getComputedStyle(document.activeElement).outlineStyle"
        assert browser.execute_script(outline) == "solid"
        for key, expected in (("right", 0), ("right", 1), ("end", count - 1), ("home", 0)):
            tokens.send_keys(KEYS[key])
            assert selected() == f"steps-{expected}"
        tokens.send_keys(KEYS["down"])
        below = browser.execute_script(
            "const [a, b] = ['steps-0', arguments[0]].map(id => document.getElementById(id));"
            "return b.offsetTop > a.offsetTop",
            selected(),
        )
        assert below
        assert "trained on" in browser.execute_script(VISIBLE, "#steps .detail")


def test_injected_and_naughty_strings_stay_text(browser, tmp_path, injections, data):
    naughty = [text for text in json.loads((data / "unicode" / "blns.json").read_text()) if text]
    texts_of = [*injections, *naughty]
    # All in one document, so that the viewer shows all of them.
    whole = "\n".join(text.replace("\x00", "") for text in texts_of)
    store = ps.build(ps.Texts([whole, *injections * 2]), tmp_path / "<u>store", tokenizer="bytes")
    subject = open_subject(store)
    with ReportServer("<script>alert(0)</script>", lambda: subject) as server:
        server.open()
        with opened(browser, server.url):
            wait_for(browser, "document.querySelectorAll('#documents .tokens span').length > 0")
            browser.execute_script(
                "document.querySelector('.number').value = 0;"
                "document.querySelector('.go').requestSubmit()"
            )
            wait_for(browser, "document.querySelectorAll('#documents .tokens span').length > 5000")
            shown = "".join(texts(browser, "#documents .tokens span")).replace("↵", "")
            for text in injections:
                if text.isprintable():
                    assert text in shown
            made = browser.execute_script(
                "return [...document.querySelectorAll('body *')].map(each => each.localName)"
            )
            refused = {"img", "iframe", "object", "embed", "video", "math", "marquee", "u", "b"}
            assert not refused & set(made)
            assert "alert(0)" in browser.title


def test_a_page_has_no_scroll_bar_on_a_phone_and_follows_the_dark_theme(browser, page):
    size = {"height": 800, "deviceScaleFactor": 1, "mobile": True}
    colours = set()
    try:
        with opened(browser, page):
            for width in (320, 390, 1200):
                browser.execute_cdp_cmd(
                    "Emulation.setDeviceMetricsOverride", {"width": width, **size}
                )
                wide = browser.execute_script("return document.documentElement.scrollWidth")
                assert wide <= width
            for theme in ("light", "dark"):
                chosen = {"name": "prefers-color-scheme", "value": theme}
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [chosen]})
                script = "return [document.body, ...document.querySelectorAll('#loss svg text')]"
                script += ".slice(0, 2).map(each => getComputedStyle(each)).map("
                script += "each => each.backgroundColor + each.color + each.fill).join()"
                colours.add(browser.execute_script(script))
        assert len(colours) == 2
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_everything_that_a_reader_needs_has_a_name(browser, page):
    script = """
        const nameless = [];
        const named = "svg[role=img], [role=region], [role=listbox], nav";
        for (const each of document.querySelectorAll(named))
          if (!each.getAttribute("aria-label")) nameless.push(each.outerHTML.slice(0, 80));
        for (const each of document.querySelectorAll("select, input"))
          if (!each.labels.length) nameless.push(each.outerHTML);
        for (const each of document.querySelectorAll("button"))
          if (!(each.textContent.trim() || each.ariaLabel)) nameless.push(each.outerHTML);
        const ids = [...document.querySelectorAll("[id]")].map(each => each.id);
        for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) nameless.push(id);
        return nameless;
    """
    with opened(browser, page):
        assert browser.execute_script(script) == []
        for landmark in ("header", "nav", "main", "footer"):
            assert len(texts(browser, landmark)) == 1


def test_a_served_page_fetches_its_sections_and_any_step(browser, here):
    with ReportServer("run", lambda: open_subject("run")) as server:
        server.open()
        with opened(browser, server.url):
            wait_for(browser, "document.getElementById('main').ariaBusy === 'false'")
            assert texts(browser, "h2")[:3] == ["Run", "Loss", "Steps"]
            assert texts(browser, ".failed") == []
            browser.execute_script(
                "document.querySelector('#steps .number').value = 4;"
                "document.querySelector('#steps .go').requestSubmit()"
            )
            wait_for(
                browser,
                "document.querySelector('#steps .row-title').textContent.includes('position 12:')",
            )
