"""The page at / and what it shows of the plan, without a browser; see test_page_in_browser."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import httpx
import pytest
from helpers.fake_engine import FakeEngine
from helpers.served import DEMO, demo_tokenizer, make_service, serving

from llmpq.assigner.planner import even_plan
from llmpq.dist.metrics.progress import Event
from llmpq.server.page import plan_view
from llmpq.server.page.plan_view import PlanView

PAGE = Path(plan_view.__file__).with_name("index.html").read_text(encoding="utf-8")


def demo_plan():
    return even_plan(DEMO, bits=[16, 8, 4, 3], stages=2, shape=(4, 300, 200), micro_batch=(2, 2))


def test_page_runs_its_own_script_only():
    with serving(make_service(FakeEngine())) as served:
        answer = httpx.get(f"{served.url}/")
    assert answer.status_code == 200
    assert answer.text == PAGE
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        (body,) = re.findall(rf"<{kind}>(.*?)</{kind}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_page_takes_nothing_from_the_network():
    assert re.findall(r"https?://[^\"'\s]+", PAGE) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<(link|img|iframe)[^>]*(href|src)=\"(?!data:)", PAGE)
    assert "innerHTML" not in PAGE  # a model's text never becomes markup


def test_server_info_has_plan_and_counters():
    view = PlanView(demo_plan())
    with serving(make_service(FakeEngine(max_model_len=500)), view=view) as served:
        found = httpx.get(f"{served.url}/server_info").json()
    assert found["max_model_len"] == 500
    assert found["has_chat_template"] is True
    assert (found["running"], found["waiting"]) == (0, 0)
    first, second = found["plan"]["stages"]
    assert first["bits"] == [16, 8, 4, 3, 16, 8]
    assert second["first_layer"] == 6
    assert 0 < first["memory_bytes"] < first["capacity_bytes"]
    assert first["busy"] is None


def test_server_info_without_plan_or_template():
    service = make_service(FakeEngine(), tokenizer=demo_tokenizer(None))
    with serving(service) as served:
        found = httpx.get(f"{served.url}/server_info").json()
    assert found["plan"] is None
    assert found["has_chat_template"] is False


def test_page_is_open_and_server_info_needs_the_key():
    key = "a-key-of-the-server"
    with serving(make_service(FakeEngine()), api_keys=(key,)) as served:
        assert httpx.get(f"{served.url}/").status_code == 200
        assert httpx.get(f"{served.url}/server_info").status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{served.url}/server_info", headers=headers).status_code == 200


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def busy(rank: int, done_ms: int, total_ms: int) -> Event:
    return Event(rank=rank, kind="busy", done=done_ms, total=total_ms)


def test_load_of_a_stage_is_that_between_its_last_reports():
    clock = Clock()
    view = PlanView(demo_plan(), clock)
    assert view.busy(0) is None
    view.report(Event(rank=0, kind="load", done=1, total=6))
    assert view.busy(0) is None
    view.report(busy(0, 900, 1000))
    assert view.busy(0) == pytest.approx(0.9)
    view.report(busy(0, 1000, 2000))
    assert view.busy(0) == pytest.approx(0.1)
    view.report(busy(1, 30, 40))
    assert (view.busy(0), view.busy(1)) == (pytest.approx(0.1), pytest.approx(0.75))
    clock.now_s += plan_view.IDLE_S
    assert view.busy(0) == 0.0


def test_load_after_a_restart_begins_anew():
    view = PlanView(demo_plan(), Clock())
    view.report(busy(0, 50_000, 100_000))
    view.report(busy(0, 600, 1000))
    assert view.busy(0) == pytest.approx(0.6)
    view.report(busy(0, 600, 1000))  # the same counters twice: no time has passed
    assert view.busy(0) == 0.0
