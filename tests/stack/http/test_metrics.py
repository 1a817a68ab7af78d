"""The metrics that Prometheus reads of a stack, and the callers that may read them."""

import asyncio
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from apis.provider import ProviderMetrics
from providers.common.counters import DAMAGED_RECORDS, WATCHER_FAILURES
from providers.inference.scripted import Scripted
from stack.http.metrics import read_shared_metrics
from tests.stack.http.raw import Answer, ask, bearer, check_error, connection, request
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.worker_processes import worker_processes

KEYS: Any = [{"key": "sk-one", "tenant": "tenant-one"}, {"key": "sk-two", "tenant": "tenant-two"}]
USED = {"input_tokens": 7, "output_tokens": 5, "cached_tokens": 3, "reasoning_tokens": 2}
SAYS: list[dict[str, Any]] = [{"text": "hello"}, {"finish": "stop", "usage": USED}]
ENDLESS: list[dict[str, Any]] = [{"text": "once "}, {"wait_s": 30}]
RESPONSES = "/v1/responses"


@dataclass(frozen=True)
class Counts:
    running: int
    busy_s: float


class MetricsProvider(Scripted):
    """A provider with metrics of its own, like an engine."""

    def metrics(self) -> ProviderMetrics:
        return Counts(running=2, busy_s=0.25)


async def scrape(served: Served, key: str = "") -> Answer:
    return await ask(served.url, method="GET", path="/metrics", headers=bearer(key) if key else (), kind=None)


def read(answer: Answer) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples by name, as Prometheus' own parser reads them."""
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


async def figures(served: Served, key: str = "") -> Mapping[str, list[tuple[dict[str, str], float]]]:
    return read(await scrape(served, key))


async def value(served: Served, name: str, **labels: str) -> float:
    """The one sample of that name with those labels; 0 for none."""
    numbers = [number for its, number in (await figures(served)).get(name, []) if labels.items() <= its.items()]
    assert len(numbers) <= 1
    return numbers[0] if numbers else 0


async def until(served: Served, name: str, expected: float, **labels: str) -> None:
    async with asyncio.timeout(10):
        while await value(served, name, **labels) != expected:
            pass


# --- who may read it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "statuses"),
    [
        ({}, {"": 200}),
        ({"api_keys": KEYS}, {"": 401, "sk-three": 401, "sk-one": 403, "sk-two": 403}),
        ({"api_keys": ["sk-one", "sk-two"]}, {"": 401, "sk-three": 401, "sk-one": 200, "sk-two": 200}),
        ({"api_keys": KEYS, "metrics": "open"}, {"": 200, "sk-three": 200}),
        ({"api_keys": KEYS, "metrics": "closed"}, {"": 401, "sk-one": 404}),
        ({"metrics": "closed"}, {"": 404}),
        ({"api_keys": KEYS, "metrics_key": "mk"}, {"": 401, "sk-one": 401, "m": 401, "mk": 200}),
        ({"metrics_key": "mk"}, {"": 401, "mk": 200}),
    ],
)
async def test_it_is_read_by_whom_the_config_lets(server: dict[str, Any], statuses: dict[str, int]) -> None:
    """The figures of several tenants are read with `metrics_key` alone."""
    async with serving(server=server) as served:
        for key, status in statuses.items():
            answer = await scrape(served, key)
            assert answer.status == status, key
            if status == 401:
                assert check_error(answer, 401)["code"] == "invalid_api_key"


async def test_the_key_to_the_figures_opens_nothing_else() -> None:
    async with serving(server={"api_keys": KEYS, "metrics_key": "mk"}) as served:
        for method, path in (("POST", RESPONSES), ("GET", "/v1/models"), ("GET", "/version"), ("GET", "/metrics/")):
            check_error(await ask(served.url, b"{}", method=method, path=path, headers=bearer("mk")), 401)


async def test_a_foreign_host_is_refused_here_too() -> None:
    async with serving(server={"metrics": "open"}) as served:
        check_error(await ask(served.url, method="GET", path="/metrics", headers=[("host", "evil.example")]), 403)


async def test_it_is_only_read_and_also_while_the_server_drains() -> None:
    async with serving() as served:
        for method in ("POST", "DELETE"):
            check_error(await ask(served.url, b"{}", method=method, path="/metrics"), 405)
        served.app.state.draining = True
        assert (await scrape(served)).status == 200


async def test_the_version_is_shown_to_callers_with_a_key() -> None:
    async with serving(server={"api_keys": KEYS}) as served:
        check_error(await ask(served.url, method="GET", path="/version"), 401)
        answer = await ask(served.url, method="GET", path="/version", headers=bearer("sk-one"))
    assert answer.json.keys() == {"name", "version", "dialects"}
    assert answer.json["name"] == "responses-stack"
    assert answer.json["dialects"] == ["openai", "open-responses"]


# --- what it says ----------------------------------------------------------------------------------------------------


async def test_requests_are_counted_by_the_template_of_their_route() -> None:
    async with serving() as served:
        for path in (f"{RESPONSES}/resp_{'0' * 32}", "/responses/secret-name", "/secret/path", f"{RESPONSES}/a/b"):
            await ask(served.url, method="GET", path=path)
        await ask(served.url, {"model": "scripted", "input": "hi"})
        await ask(served.url, {"model": "scripted", "input": "hi"}, path="/responses")
        await ask(served.url, {"model": "scripted", "input": 5})
        await ask(served.url, method="PUT")
        await ask(served.url, b"x", kind="text/plain")
        await ask(served.url, method="GET", path="/healthz")
        answer = await scrape(served)
        rows = {
            (labels["route"], labels["method"], labels["status"]): count
            for labels, count in read(answer)["stack_requests_total"]
        }
    assert rows == {
        ("/v1/responses/{response_id}", "GET", "404"): 2,
        ("other", "GET", "404"): 2,
        (RESPONSES, "POST", "200"): 2,
        (RESPONSES, "POST", "400"): 1,
        (RESPONSES, "POST", "415"): 1,
        (RESPONSES, "PUT", "405"): 1,
        ("/healthz", "GET", "200"): 1,
    }
    assert b"secret" not in answer.body


async def test_how_responses_end_and_what_they_use_is_counted() -> None:
    cut: list[dict[str, Any]] = [{"text": "hello"}, {"finish": "length", "usage": USED}]
    broken: list[dict[str, Any]] = [{"text": "hello"}, {"fail": "boom"}]
    async with serving(scripted(SAYS, SAYS, cut, broken, broken, SAYS, SAYS)) as served:
        ask_for: dict[str, Any] = {"model": "scripted", "input": "hi"}
        for more in ({}, {"stream": True}, {"stream": True}, {"stream": True}, {}):
            await ask(served.url, {**ask_for, **more})
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
        await ask(served.url, chat, path="/v1/chat/completions")
        await ask(served.url, {**chat, "stream": True}, path="/v1/chat/completions")
        ends = {labels["status"]: count for labels, count in (await figures(served))["stack_responses_total"]}
        used = {(its["model"], its["kind"]): count for its, count in (await figures(served))["stack_tokens_total"]}
        assert await value(served, "stack_time_to_first_output_seconds_count") == 3
        shares = (
            await value(served, "stack_cached_input_share_count"),
            await value(served, "stack_cached_input_share_sum"),
        )
        assert shares[0] == 7
        assert 0 < shares[1] <= 5 * USED["cached_tokens"] / USED["input_tokens"]
        assert await value(served, "stack_time_to_first_byte_seconds_count", route=RESPONSES) == 3
        assert await value(served, "stack_request_duration_seconds_count", route=RESPONSES) == 5
        assert await value(served, "stack_request_duration_seconds_bucket", route=RESPONSES, le="+Inf") == 5
    assert ends == {"completed": 2, "incomplete": 1, "failed": 2}
    assert used["scripted", "input"] >= 5 * USED["input_tokens"]
    assert used["scripted", "cached"] == 5 * USED["cached_tokens"]
    assert used["scripted", "reasoning"] == 5 * USED["reasoning_tokens"]


async def test_a_request_that_is_refused_made_no_response() -> None:
    async with serving() as served:
        await ask(served.url, {"model": "nobody", "input": "hi"})
        await ask(served.url, {"model": "scripted", "input": "hi", "previous_response_id": "resp_0", "stream": True})
        assert "stack_responses_total" not in await figures(served)


async def test_background_responses_are_counted_where_they_are_taken() -> None:
    async with serving() as served:
        for stream in (False, True):
            body = {"model": "scripted", "input": "hi", "background": True, "stream": stream}
            response = await ask(served.url, body)
        await ask(served.url, method="GET", path=f"{RESPONSES}/{_id_in(response)}?stream=true")
        ends = {labels["status"]: count for labels, count in (await figures(served))["stack_responses_total"]}
    assert ends == {"queued": 2}


async def test_background_responses_that_run_and_that_wait_are_shown_for_autoscaling() -> None:
    responses = {"background": {"max_running": 1, "lease_s": 0.2, "poll_s": 0.05}}
    async with serving(scripted(ENDLESS), responses=responses) as served:
        create = served.client.responses.create
        ids = [(await create(model="scripted", input="hi", background=True)).id for _ in range(3)]
        await until(served, "stack_responses_background_running", 1, provider="responses")
        await until(served, "stack_responses_background_waiting", 2, provider="responses")
        for response_id in ids:
            await served.client.responses.cancel(response_id)
        await until(served, "stack_responses_background_waiting", 0, provider="responses")
        await until(served, "stack_responses_background_running", 0, provider="responses")


def _id_in(answer: Answer) -> str:
    match = re.search(rb"resp_[0-9a-f]{32}", answer.body)
    assert match is not None
    return match[0].decode()


async def test_running_responses_are_counted_and_a_client_that_leaves_cancels_one() -> None:
    async with serving(scripted(ENDLESS)) as served:
        async with connection(served.url) as (reader, writer):
            writer.write(request(served.url, {"model": "scripted", "input": "hi", "stream": True}))
            await reader.readuntil(b"output_text.delta")
            assert await value(served, "stack_streams_open") == 1
            assert await value(served, "stack_requests_in_flight") == 2  # with the one that asks
        await until(served, "stack_responses_total", 1, status="cancelled")
        await until(served, "stack_streams_open", 0)
        assert await value(served, "stack_requests_in_flight") == 1
        assert await value(served, "stack_requests_total", route=RESPONSES, status="200") == 1


async def test_a_client_that_leaves_before_its_answer_is_counted_as_gone() -> None:
    async with serving(scripted(ENDLESS)) as served:
        async with connection(served.url) as (_, writer):
            writer.write(request(served.url, {"model": "scripted", "input": "hi"}))
            await until(served, "stack_requests_in_flight", 2)
        await until(served, "stack_requests_total", 1, route=RESPONSES, status="499")


async def test_a_name_that_the_inference_does_not_list_is_one_of_the_others() -> None:
    router: dict[str, Any] = {
        "provider": "router",
        "providers": {"a": scripted(*[SAYS] * 4)},
        "default": "scripted",
    }
    async with serving(router) as served:
        for model in ("scripted", "secret-one", 'se"cret\\two', "scripted"):
            assert (await ask(served.url, {"model": model, "input": "hi"})).status == 200
        for _ in range(2):
            answer = await scrape(served)
            counts = {(its["model"], its["kind"]): count for its, count in read(answer)["stack_tokens_total"]}
            assert {model for model, _ in counts} == {"scripted", "other"}
            assert counts["scripted", "output"] == counts["other", "output"] == 2 * USED["output_tokens"]
            assert b"secret" not in answer.body


async def test_metrics_name_no_tenant_key_or_id() -> None:
    async with serving(server={"api_keys": KEYS, "metrics_key": "mk"}) as served:
        await ask(served.url, {"model": "scripted", "input": "hi"}, headers=bearer("sk-one"))
        answer = await scrape(served, "mk")
    for secret in (b"tenant", b"sk-", b"resp_", b"req_"):
        assert secret not in answer.body


async def test_an_engines_own_metrics_are_exported() -> None:
    async with serving({"provider": f"{__name__}:MetricsProvider"}) as served:
        assert await value(served, "stack_inference_running", provider="inference") == 2
        assert await value(served, "stack_inference_busy_seconds", provider="inference") == 0.25
        assert await value(served, "process_resident_memory_bytes") > 2**20
        assert await value(served, "process_open_fds") > 2


async def test_metrics_of_a_routers_members_have_their_path_as_label() -> None:
    providers = {
        "a": {"provider": f"{__name__}:MetricsProvider"},
        "b": {"provider": f"{__name__}:MetricsProvider", "model": "b"},
    }
    async with serving({"provider": "router", "providers": providers}) as served:
        rows = (await figures(served))["stack_inference_running"]
    assert sorted(labels["provider"] for labels, _ in rows) == ["inference.providers.a", "inference.providers.b"]


def total(answer: Answer, name: str, **labels: str) -> float:
    """The sum of the samples of that name with those labels."""
    return sum(number for its, number in read(answer).get(name, []) if labels.items() <= its.items())


async def scrape_until(url: str, name: str, expected: float) -> Answer:
    """Scrape until the gauges of the other worker, which are up to a second old, have caught up."""
    async with asyncio.timeout(20):
        while True:
            answer = await ask(url, method="GET", path="/metrics", kind=None)
            if total(answer, name) == expected:
                return answer
            await asyncio.sleep(0.1)


def folders_of_metrics(workers: list[psutil.Process]) -> set[Path]:
    return {
        Path(file.path).parent for process in workers for file in process.memory_maps() if "stack-metrics-" in file.path
    }


async def test_a_scrape_of_any_worker_gives_the_sums_of_all_and_the_files_go_with_the_server(tmp_path: Path) -> None:
    """Requests of a worker that was killed stay counted."""
    # a copy each, because a run config with many YAML aliases is refused
    more = {"inference": {"provider": "scripted", "turns": json.loads(json.dumps([SAYS] * 30))}}
    sent = 0
    async with worker_processes(tmp_path, {"provider": "sqlite", "path": str(tmp_path / "kv.db")}, more=more) as served:

        async def both_ready() -> list[psutil.Process]:
            async with asyncio.timeout(60):
                while True:
                    answer = await ask(served.url, method="GET", path="/metrics", kind=None)
                    if len(read(answer)["process_open_fds"]) == 2 and len(served.processes()) == 2:
                        return served.processes()
                    await asyncio.sleep(0.1)

        async def send(to: psutil.Process, count: int) -> None:
            nonlocal sent
            others = [process for process in served.processes() if process != to]
            for process in others:
                process.suspend()
            try:
                for _ in range(count):
                    answer = await ask(served.url, {"model": "scripted", "input": "hi"})
                    assert answer.status == 200
                    sent += 1
                scraped = await ask(served.url, method="GET", path="/metrics", kind=None)
            finally:
                for process in others:
                    process.resume()
            assert total(scraped, "stack_requests_total", route=RESPONSES) == sent
            assert total(scraped, "stack_request_duration_seconds_count", route=RESPONSES) == sent
            assert total(scraped, "stack_request_duration_seconds_bucket", route=RESPONSES, le="+Inf") == sent
            assert total(scraped, "stack_responses_total", status="completed") == sent

        one, other = await both_ready()
        await send(one, 3)
        await send(other, 5)
        tokens = await scrape_until(served.url, "stack_tokens_total", sent * sum(USED.values()))
        assert total(tokens, "stack_tokens_total", model="scripted", kind="cached") == sent * USED["cached_tokens"]
        one.kill()
        await asyncio.to_thread(one.wait, 10)
        await send(other, 2)
        (new,) = [process for process in await both_ready() if process != other]
        await send(new, 4)
        await send(other, 1)
        scraped = await scrape_until(served.url, "stack_requests_in_flight", 1)
        (folder,) = folders_of_metrics(served.processes())
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    assert {its["worker"] for its, _ in read(scraped)["process_open_fds"]} == {"0", "1"}
    assert not any("worker" in its for its, _ in read(scraped)["stack_requests_total"])


async def test_damaged_records_and_failures_of_watchers_are_counted() -> None:
    """The operator sees that something was skipped, and what."""
    async with serving(scripted()) as served:
        before = await figures(served)
        DAMAGED_RECORDS.add()
        WATCHER_FAILURES.add()
        after = await figures(served)
    for name in ("stack_damaged_records_total", "stack_watcher_failures_total"):
        assert after[name] == [({}, before[name][0][1] + 1)]


def test_a_worker_that_is_just_beginning_its_files_fails_no_scrape(tmp_path: Path) -> None:
    """It creates a file before it gives it a size."""
    file = tmp_path / "counter_1.db"
    file.touch()
    threading.Timer(0.03, lambda: os.truncate(file, 2**16)).start()
    assert [*read_shared_metrics(tmp_path)] == []
