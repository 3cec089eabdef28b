"""The page in a real browser, before a real cluster."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from baton.client import Client
from tests.conftest import Checkpoint
from tests.harness.cluster import Cluster
from tests.harness.router import KeyFile, run_router, stub_workers, wait_ready
from tests.harness.waiting import wait_for
from tests.system.ui.chromium import Browser, Page

pytestmark = pytest.mark.system
EVIL = "<img src=x onerror=\"window.hurt=1\"><script>window.hurt=1</script></p><b id='bold'>"
MARKUP = "document.querySelector('#messages img, #messages script, #messages b, #bold')"
NARROWEST = 360
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "parameters": {**WEATHER, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture
def page_at(page: Page, cluster: Cluster) -> Page:
    """The page, with figures in it."""
    page.open(f"{cluster.http}/ui")
    page.wait("document.querySelector('#state').innerText === 'live'", "the cluster is seen as live")
    return page


def names(page: Page) -> set[str]:
    found: list[str] = page.run("[...document.querySelectorAll('.node title')].map((e) => e.textContent)")
    return {title.partition(",")[0] for title in found}


def overflows(page: Page) -> list[str]:
    """Elements that stick out to the right of the window, and are not inside something that scrolls."""
    told: list[str] = page.run(
        """[...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll, .hidden, .skip, svg')
           && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + '.' + e.className)"""
    )
    return told


def test_the_topology_shows_all_of_the_cluster_and_kv_flowing(page_at: Page, cluster: Cluster) -> None:
    workers = {worker["id"] for worker in cluster.workers()}
    assert len(workers) == 4
    page_at.wait("document.querySelectorAll('.node').length === 5", "a router and four workers")
    assert workers < names(page_at)
    assert page_at.run("document.querySelectorAll('#workers tbody tr').length") == 4
    assert page_at.text("#model") == "model"
    with Client(cluster.grpc) as client:
        for number in range(3):
            client.generate(f"def number_{number}(value):\n", max_tokens=4)
    page_at.wait("document.querySelector('.edge.kv.moving')", "a hand-off")
    moving = page_at.run("getComputedStyle(document.querySelector('.edge.moving .dots')).animationName")
    assert moving == "flow"
    page_at.media(still=True)
    still = page_at.run("getComputedStyle(document.querySelector('.edge.moving .dots')).animationName")
    assert still == "none"


def test_percentiles_appear_after_load(page_at: Page, cluster: Cluster) -> None:
    with Client(cluster.grpc) as client:
        client.generate("import os\n", max_tokens=16)
    titles = page_at.run("[...document.querySelectorAll('.chart svg')].map((e) => e.ariaLabel)")
    assert len(titles) == 4
    for chart in ("Time to first token", "Between tokens"):
        label = (
            f"""[...document.querySelectorAll('.chart svg')].find((e) => e.ariaLabel.startsWith('{chart}'))"""
        )
        page_at.wait(
            f"/now p50 [0-9.]+ (ms|µs|s), p99 [0-9.]+/.test({label}.ariaLabel)", f"{chart} has percentiles"
        )
        page_at.wait(
            f"{label}.querySelector('path.line.s1').getAttribute('d').length > 5", f"{chart} has a line"
        )
    assert page_at.run("document.querySelector('.tile .value').innerText") != "–"
    # Arrow keys move the pointer through the past, and all charts follow.
    page_at.focus(".chart svg")
    page_at.press("ArrowLeft")
    page_at.wait(
        "document.querySelectorAll('.chart .cross:not([visibility])').length === 4", "the pointer shows"
    )


def test_a_message_streams_an_answer_with_its_timings(page_at: Page) -> None:
    page_at.run(
        """window.lengths = new Set();
        new MutationObserver(() => window.lengths.add(document.querySelector('.model .text')?.textContent.length))
          .observe(document.querySelector('#messages'), { childList: true, subtree: true, characterData: true })"""
    )
    page_at.type("#question", "What does `os.path.join` do?", enter=True)
    page_at.wait("document.querySelector('.waterfall')", "the end of the answer", 60)
    assert page_at.text(".message.user") == "What does `os.path.join` do?"
    assert len(page_at.text(".message.model .text")) > 0
    assert page_at.run("window.lengths.size") > 3, "it came in pieces"
    facts = page_at.text(".facts")
    assert "tokens · first after" in facts and "prompt tokens cached" in facts
    assert page_at.run("document.querySelectorAll('.waterfall rect').length") >= 3
    page_at.click(".waterfall summary")
    table = page_at.text(".waterfall table")
    assert "prefill queue" in table and "hand-off, exposed" in table and "from request to end" in table
    page_at.type("#question", "Again, please.", enter=True)
    page_at.wait("document.querySelectorAll('.waterfall').length === 2", "a second turn", 60)
    page_at.click("#clear")
    assert page_at.run("document.querySelectorAll('.message').length") == 0


def test_a_message_goes_to_the_chosen_model(page: Page, cluster: Cluster) -> None:
    with urllib.request.urlopen(f"{cluster.http}/v1/models", timeout=10) as answer:
        (served,) = json.load(answer)["data"]
    models = [{"id": "not served"}, {"id": "vectors", "generation": False}, served]
    page.fake("/v1/models", "application/json", json.dumps({"data": models}))
    page.open(f"{cluster.http}/ui")
    page.wait("!document.querySelector('#models').hidden", "a choice of models")
    choice = "document.querySelector('#model-choice')"
    assert page.run(f"[...{choice}.options].map((e) => e.value)") == ["not served", served["id"]]
    page.run(f"{choice}.value = {json.dumps(served['id'])}; {choice}.dispatchEvent(new Event('change'))")
    page.type("#question", "Who are you?", enter=True)
    page.wait("document.querySelector('.waterfall')", "the end of the answer", 60)


def test_a_key_whose_models_are_away_is_no_fault_of_the_page(page: Page, cluster: Cluster) -> None:
    """One that names adapters alone, before they are loaded: the page said that it could not read a property."""
    page.fake("/v1/models", "application/json", json.dumps({"data": []}))
    page.open(f"{cluster.http}/ui")
    page.wait("document.querySelectorAll('.node').length === 5", "the topology")
    assert page.run("document.querySelector('#notice').hidden") is True


def test_an_answer_can_be_stopped(page_at: Page, cluster: Cluster) -> None:
    page_at.run("document.querySelector('#max-tokens').value = '3000'")
    # An answer that would go on: the page asks as always, with one field more.
    page_at.run(
        """(() => { const plain = window.fetch; window.fetch = (url, options) => plain(url, options?.body
          ? { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true }) } : options); })()"""
    )
    page_at.type("#question", "Write a class `Counter`.", enter=True)
    page_at.wait("document.querySelector('.model .text').textContent.length > 0", "the answer begins")
    page_at.click("#stop")
    page_at.wait("document.querySelector('.facts')?.innerText === 'stopped'", "it is shown as stopped")
    page_at.wait("!document.querySelector('#send').hidden", "one can ask again")

    def in_flight() -> int:
        with urllib.request.urlopen(f"{cluster.http}/v1/cluster/live", timeout=10) as answer:
            return int(json.load(answer)["now"]["requests_in_flight"])

    wait_for(lambda: in_flight() == 0, 30, "the cluster has stopped as well")


def choose_tools(page: Page, choice: str) -> None:
    page.run("document.querySelector('.tools').open = true")
    page.run(f"document.querySelector('#tools').value = {json.dumps(json.dumps(TOOLS))}")
    page.run(f"document.querySelector('#tool-choice').value = '{choice}'")


def test_calls_show_their_arguments_as_they_stream_and_take_a_result(page_at: Page) -> None:
    page_at.run(
        """window.lengths = new Set();
        new MutationObserver(() => window.lengths.add(document.querySelector('.call .text')?.textContent.length))
          .observe(document.querySelector('#messages'), { childList: true, subtree: true, characterData: true });
        window.asked = []; const plain = window.fetch; window.fetch = (url, options) => {
          if (options?.body) window.asked.push(JSON.parse(options.body)); return plain(url, options); }"""
    )
    page_at.run("document.querySelector('#temperature').value = '0'")
    choose_tools(page_at, "required")
    page_at.type("#question", "The weather?", enter=True)
    page_at.wait("document.querySelector('.call input')", "a call, and a field for its result", 60)
    assert page_at.text(".call .name") == "get_weather"
    assert json.loads(page_at.text(".call .arguments"))["city"] in ("Bern", "Oslo")
    assert page_at.run("window.lengths.size") > 3, "its arguments came in pieces"
    count = page_at.run("document.querySelectorAll('.call').length")
    page_at.run("document.querySelector('#tool-choice').value = 'auto'")
    page_at.run("document.querySelector('#max-tokens').value = '8'")
    page_at.type(".call input", "12 degrees", enter=True)
    page_at.wait("document.querySelectorAll('.waterfall').length === 2", "an answer to the result", 60)
    question, called, *results = page_at.run("window.asked.at(-1).messages")
    assert (question["role"], called["role"], len(results)) == ("user", "assistant", count)
    assert [one["tool_call_id"] for one in results] == [one["id"] for one in called["tool_calls"]]
    assert results[0] == {
        "role": "tool",
        "tool_call_id": called["tool_calls"][0]["id"],
        "content": "12 degrees",
    }
    assert page_at.run("document.querySelector('.call input').disabled") is True
    # What is no JSON is an error of the answer, and the conversation stays as it was
    page_at.run("document.querySelector('#tools').value = '[{'")
    page_at.type("#question", "Again", enter=True)
    page_at.wait("document.querySelector('.wrong')?.innerText.startsWith('tools: ')", "the error")


def test_reasoning_is_folded_and_markup_in_it_or_in_a_call_stays_text(page_at: Page) -> None:
    function = {"name": EVIL, "arguments": EVIL}
    deltas: list[dict[str, object]] = [{"reasoning_content": EVIL}, {"reasoning_content": " so"}]
    deltas += [{"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": function}]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}]
    usage = {"prompt_tokens": 1, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 7}
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas] + [{"choices": [], "usage": usage}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    page_at.fake("/v1/chat/completions", "text/event-stream", f"{body}data: [DONE]\n\n")
    page_at.type("#question", "Hello", enter=True)
    page_at.wait("document.querySelector('.call input')", "the end of the answer")
    assert page_at.text(".reasoning summary") == "Reasoning, 7 tokens"
    hidden = "!document.querySelector('.reasoning .text').checkVisibility()"
    assert page_at.run(hidden) is True
    page_at.click(".reasoning summary")
    assert page_at.run(hidden) is False
    assert page_at.text(".reasoning .text") == f"{EVIL} so"
    assert page_at.text(".call .name") == EVIL
    assert page_at.text(".call .arguments") == EVIL + "}"
    assert page_at.run(f"{MARKUP} === null && window.hurt === undefined") is True


def test_markup_in_a_message_or_an_answer_stays_text(page_at: Page) -> None:
    chunk = {"choices": [{"delta": {"content": EVIL}}]}
    page_at.fake(
        "/v1/chat/completions", "text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    )
    page_at.type("#question", EVIL, enter=True)
    page_at.wait("document.querySelector('.model .text').textContent.length > 0", "the answer")
    assert page_at.text(".message.user") == EVIL
    assert page_at.text(".message.model .text") == EVIL
    assert page_at.run(f"{MARKUP} === null && window.hurt === undefined") is True


def test_names_from_the_cluster_stay_text(page: Page, cluster: Cluster) -> None:
    with urllib.request.urlopen(f"{cluster.http}/v1/cluster/live", timeout=10) as answer:
        view = json.load(answer)
    view["workers"][0]["id"] = view["routers"][0]["id"] = EVIL
    page.fake("/v1/cluster/live", "application/json", json.dumps(view))
    page.open(f"{cluster.http}/ui")
    page.wait("document.querySelectorAll('.node').length === 5", "the topology")
    assert EVIL in names(page) or any(EVIL.startswith(name) for name in names(page) if "<" in name)
    assert page.run(
        "document.querySelector('main img, main script, #bold') === null && window.hurt === undefined"
    )


def test_the_policy_refuses_what_would_turn_text_into_script(browser: Browser, cluster: Cluster) -> None:
    page = Page(browser)
    page.open(f"{cluster.http}/ui")
    forbidden = {
        "document.body.innerHTML = '<b>x</b>'": "TrustedHTML",
        "eval('1')": "EvalError",
        "fetch('http://127.0.0.1:1/')": "Refused to connect",
    }
    said: list[str] = []
    for code in forbidden:
        # Not by the debugger's own evaluation, which may do more than a page: by a timer of the page.
        page.run(
            f"window.result = null; setTimeout(async () => {{ try {{ await ({code}); window.result = 'done' }}"
            f" catch (error) {{ window.result = String(error) }} }}, 0)"
        )
        page.wait("window.result !== null", code)
        result = page.run("window.result")
        assert result != "done", code
        said = [*said, result]
    for code, word in forbidden.items():
        assert any(word in one for one in [*said, *page.complaints]), (code, said)
    page.close()


@pytest.mark.parametrize("width", [NARROWEST, 768, 1080, 1920])
def test_nothing_sticks_out_at_any_width(width: int, page_at: Page) -> None:
    page_at.resize(width, 900)
    page_at.wait("document.querySelectorAll('.node').length === 5", "the topology")
    page_at.wait(
        "document.querySelector('#topology svg').viewBox.baseVal.width"
        " === document.querySelector('#topology').clientWidth",
        "the picture fits its place",
    )
    assert overflows(page_at) == []
    assert page_at.run("document.documentElement.scrollWidth") <= width
    outside = page_at.run(
        """[...document.querySelectorAll('#topology .box')].filter((e) => {
             const [box, all] = [e, document.querySelector('#topology')].map((x) => x.getBoundingClientRect());
             return box.left < all.left - 1 || box.right > all.right + 1 || box.bottom > all.bottom + 1; }).length"""
    )
    assert outside == 0


def test_dark_is_dark_and_text_can_be_read_in_both(page_at: Page) -> None:
    def luminances() -> list[float]:
        """Of the page, and the least contrast of texts to it."""
        told: list[float] = page_at.run(
            """(() => {
              const light = (color) => { const [r, g, b] = color.match(/[0-9.]+/g).map(Number).map((v) => v / 255)
                .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
              const style = (selector) => getComputedStyle(document.querySelector(selector));
              const card = light(style('.card').backgroundColor);
              const texts = ['h2', '.tile .more', '.soft', '.state.ready', '#state', 'th']
                .map((s) => light(style(s).color)).concat(
                ['.node .name', '.node .low', '.tick'].map((s) => light(style(s).fill)));
              const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
              return [light(style('body').backgroundColor), Math.min(...texts.map((t) => contrast(t, card)))];
            })()"""
        )
        return told

    page_at.wait(
        "document.querySelector('.state.ready') && document.querySelector('.node .low')", "everything"
    )
    light, contrast = luminances()
    assert light > 0.8 and contrast >= 4.5
    page_at.media(dark=True)
    dark, contrast = luminances()
    assert dark < 0.05 and contrast >= 4.5


def test_everything_has_a_name_and_a_place_in_the_order_of_keys(page_at: Page) -> None:
    nameless = page_at.run(
        """[...document.querySelectorAll('input, textarea, button, svg[role=img], [role=region], [role=log]')]
          .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel || e.getAttribute('aria-labelledby')))
          .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    page_at.press("Tab")
    assert page_at.run("document.activeElement.className") == "skip"
    page_at.press("Tab")
    assert page_at.run("document.activeElement.id") == "key"


def test_a_lost_router_is_shown_and_one_that_asks_for_keys_is_served(
    browser: Browser, checkpoint: Checkpoint, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys.yaml")
    user, admin = keys.add("acme"), keys.add("ops", admin=True)
    config = {"model": str(checkpoint("llama")), "redis_url": redis_url, "namespace": namespace}
    config |= {"api_keys_file": str(keys.path), "served_model_name": "tiny"}
    page = Page(browser)
    with stub_workers(redis_url, namespace), run_router(tmp_path, config) as router:
        wait_ready(router.http)
        page.open(f"{router.http}/ui")
        page.wait(
            "document.querySelector('#notice').innerText.includes('asks for an API key')",
            "the key is asked for",
        )

        def give(key: str) -> None:
            page.run("document.querySelector('#key').value = ''")
            page.type("#key", key, enter=True)

        give(user)
        page.wait(
            "document.querySelector('#notice').innerText.includes('admin: true')", "this key is not enough"
        )
        page.type("#question", "Hello", enter=True)
        page.wait("document.querySelector('.waterfall')", "but it may chat")
        give(admin)
        page.wait("document.querySelector('#state').innerText === 'live'", "an admin sees the cluster")
        assert page.run("document.querySelectorAll('.node').length") == 3
        assert page.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    page.wait("document.querySelector('#state').innerText === 'router unreachable'", "its end is seen")
    assert page.run("document.querySelectorAll('.node').length") == 3, "what was seen last stays"
    # The browser itself reports answers of 401 and 403, and connections refused; nothing else may be there.
    assert [one for one in page.complaints if not one.startswith("network:")] == []
    page.close()
