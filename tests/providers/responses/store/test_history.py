"""Responses and their chains in a store: what is read again, what is forgotten when, and what it costs."""

import json
from typing import Any

import orjson
import pytest

from apis.deltas import Finish, TextDelta, Usage
from apis.errors import InvalidRequest, NotFound, StackError
from apis.responses import CreateResponse
from apis.wire.base import remembered_json, sdk_model_to_json
from apis.wire.items import ITEM_LIST_ADAPTER
from providers.kv_store.memory import Memory
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_object import begin_response, end_response
from providers.responses.run.turn import TurnStream
from providers.responses.store.history import FinishedResponse, LoadedHistory
from providers.responses.store.history_cache import LoadAllowance
from providers.responses.tools.offered import OfferedTools
from tests.providers.responses.store.kept import CACHES, DAY_S, TENANT, Kept, days_later

# --- chains ----------------------------------------------------------------------------------------------------------


@CACHES
async def test_a_chain_is_read_in_the_order_it_was_said(cache_bytes: int) -> None:
    kept = Kept(cache_bytes=cache_bytes)
    a = await kept.say("a")
    b = await kept.say("b", a)
    c = await kept.say("c", b)
    assert [await kept.said(each) for each in (a, b, c)] == ["a A", "a A b B", "a A b B c C"]


@CACHES
async def test_branches_and_branches_of_branches_are_their_own(cache_bytes: int) -> None:
    kept = Kept(cache_bytes=cache_bytes)
    a = await kept.say("a")
    b = await kept.say("b", a)
    c = await kept.say("c", b)
    x = await kept.say("x", a)
    y = await kept.say("y", x)
    z = await kept.say("z", x)
    z2 = await kept.say("z2", z)
    other = await kept.say("other", c)
    assert await kept.said(c) == "a A b B c C"
    assert await kept.said(y) == "a A x X y Y"
    assert await kept.said(z2) == "a A x X z Z z2 Z2"
    assert await kept.said(other) == "a A b B c C other OTHER"


@CACHES
async def test_two_that_follow_one_turn_at_once_both_stand(cache_bytes: int) -> None:
    kept = Kept(cache_bytes=cache_bytes)
    a = await kept.say("a")
    past = await kept.history.load_history(a, tenant=TENANT)
    b = await kept.save("b", past)
    c = await kept.save("c", past)
    assert await kept.said(b) == "a A b B"
    assert await kept.said(c) == "a A c C"


@CACHES
async def test_what_tools_told_is_kept_beside_the_chain(cache_bytes: int) -> None:
    kept = Kept(cache_bytes=cache_bytes)
    b = await kept.say("b", await kept.say("a"))
    past = await kept.history.load_history(b, tenant=TENANT)
    assert sorted(told.output for told in past.tool_results.values()) == ["told a", "told b"]


@pytest.mark.parametrize("response_id", ["resp_" + "0" * 32, "resp_\0", "😀" * 256, "a/b"])
async def test_an_unknown_response_is_told_by_where_it_was_named(response_id: str) -> None:
    kept = Kept()
    with pytest.raises(InvalidRequest) as caught:
        await kept.history.load_history(response_id, tenant=TENANT)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(NotFound):
        await kept.history.load_response(response_id, tenant=TENANT)
    with pytest.raises(NotFound):
        await kept.history.delete(response_id, tenant=TENANT)


async def test_a_chain_is_followed_so_far_and_no_further() -> None:
    kept = Kept(max_turns=3)
    c = await kept.say("c", await kept.say("b", await kept.say("a")))
    assert await kept.said(c) == "a A b B c C"
    d = await kept.say("d", c)
    with pytest.raises(InvalidRequest, match="longer than 3 turns"):
        await kept.said(d)
    x = await kept.save("x", await kept.history.load_history(c, tenant=TENANT))  # a branch, whose line is short
    with pytest.raises(InvalidRequest, match="longer than 3 turns"):
        await kept.said(x)


async def test_a_circle_put_there_by_hand_ends() -> None:
    kept = Kept(max_turns=50)
    a = await kept.say("a")
    b = await kept.say("b", a)
    x = await kept.say("x", a)
    key = f"{TENANT}/turn/{x[5:]}/00000000"
    entry = await kept.store.get(key)
    assert entry is not None
    turn = orjson.loads(entry.value)
    turn["fork_point"] = [x[5:], 0]
    await kept.store.put(key, orjson.dumps(turn))
    with pytest.raises(InvalidRequest):
        await kept.said(x)
    assert await kept.said(b) == "a A b B"


# --- one response ----------------------------------------------------------------------------------------------------


async def test_a_response_is_read_as_it_was_saved() -> None:
    kept = Kept()
    a = await kept.say("a")
    response = await kept.history.load_response(a, tenant=TENANT)
    assert (response.id, response.status, response.output_text) == (a, "completed", "A")
    input_items = orjson.loads(bytes(await kept.history.load_input_items(a, tenant=TENANT)))
    assert [item["content"] for item in input_items] == ["a"]


@pytest.mark.parametrize("item_id", ["mine", "fco_0123", "😀" * 256, "a/b", "msg_" + "x" * 252])
async def test_an_item_is_found_by_the_id_that_its_client_gave(item_id: str) -> None:
    kept = Kept()
    a = await kept.say("a", item_id=item_id)
    found = await kept.find(item_id)
    assert found is not None
    assert orjson.loads(found.json)["content"] == "a"
    assert await kept.find(item_id, tenant="other") is None
    await kept.history.delete(a, tenant=TENANT)
    assert await kept.find(item_id) is None
    assert not await kept.store.keys()


async def test_an_item_of_ours_is_found_with_what_it_told() -> None:
    kept = Kept()
    a = await kept.say("a")
    response = await kept.history.load_response(a, tenant=TENANT)
    made = response.output[0].id
    assert made is not None
    found = await kept.find(made)
    assert found is not None
    assert found.tool_result is not None
    assert found.tool_result.output == "told a"
    assert await kept.find(made[:-1] + "9") is None


async def test_items_of_one_turn_are_found_in_a_few_reads() -> None:
    """D8, C2: the number of reads, and the items that are decoded, do not grow with items times size of the turn."""
    kept = Kept()
    items = [{"type": "message", "role": "user", "content": "x" * 100, "id": f"mine{number}"} for number in range(256)]
    await kept.save_items(items)
    kept.store.calls = 0
    found = await kept.history.find_items(
        {f"mine{number}": f"input[{number}].id" for number in range(256)} | {"none": "input[256].id"},
        tenant=TENANT,
        allowance=LoadAllowance(100_000),
    )
    assert [orjson.loads(each.json)["id"] for each in found.values()] == [item["id"] for item in items]
    assert kept.store.calls <= 4


async def test_unknown_items_are_looked_for_in_a_few_reads() -> None:
    """D8, C2: ids that nothing is stored of cost no read each."""
    kept = Kept()
    ids = ResponseIds()
    params = {ids.new_item_id("fs"): "input[0].id" for _ in range(100)}
    assert not await kept.history.find_items(params, tenant=TENANT, allowance=LoadAllowance(1))
    assert kept.store.calls <= 4


@CACHES
async def test_turns_that_are_looked_up_count_for_what_a_request_may_load(cache_bytes: int) -> None:
    """D2, C1: a turn counts once, however many of its items are asked for."""
    kept = Kept(cache_bytes=cache_bytes)
    items = [{"type": "message", "role": "user", "content": "x" * 900, "id": f"mine{number}"} for number in range(4)]
    await kept.save_items(items)
    params = {f"mine{number}": f"input[{number}].id" for number in range(4)}
    assert len(await kept.history.find_items(params, tenant=TENANT, allowance=LoadAllowance(8000))) == 4
    with pytest.raises(InvalidRequest) as caught:
        await kept.history.find_items(params, tenant=TENANT, allowance=LoadAllowance(8000, 6000))
    assert (caught.value.param, caught.value.code) == ("input[0].id", "history_too_large")


# --- forgetting ------------------------------------------------------------------------------------------------------


@CACHES
async def test_a_deleted_response_is_unknown_and_later_turns_keep_it(cache_bytes: int) -> None:
    kept = Kept(cache_bytes=cache_bytes)
    a = await kept.say("a")
    b = await kept.say("b", a)
    await kept.history.delete(a, tenant=TENANT)
    with pytest.raises(NotFound):
        await kept.history.load_response(a, tenant=TENANT)
    with pytest.raises(InvalidRequest):
        await kept.history.load_history(a, tenant=TENANT)
    with pytest.raises(NotFound):
        await kept.history.delete(a, tenant=TENANT)
    assert await kept.said(b) == "a A b B"
    assert await kept.said(await kept.say("c", b)) == "a A b B c C"


@pytest.mark.parametrize("order", ["abcxyz", "zyxcba", "bcaxzy", "xyzabc", "cazbyx", "ybxazc"])
@CACHES
async def test_once_all_are_deleted_nothing_is_left_whatever_the_order(order: str, cache_bytes: int) -> None:
    kept = Kept(cache_bytes=cache_bytes)
    ids: dict[str, str] = {}
    for name, after in (("a", ""), ("b", "a"), ("c", "b"), ("x", "a"), ("y", "x"), ("z", "x")):
        ids[name] = await kept.say(name, ids.get(after))
    expected = {"a": "a A", "b": "a A b B", "c": "a A b B c C", "x": "a A x X", "y": "a A x X y Y", "z": "a A x X z Z"}
    for number, name in enumerate(order):
        await kept.history.delete(ids[name], tenant=TENANT)
        for rest in order[number + 1 :]:
            assert await kept.said(ids[rest]) == expected[rest]
    assert await kept.store.keys() == []


async def test_a_chain_in_use_is_kept_and_one_that_is_not_is_forgotten() -> None:
    kept = Kept(retention_s=10 * DAY_S)
    last = await kept.say("a")
    alone = await kept.say("alone")
    with pytest.MonkeyPatch.context() as patch:
        for day in range(4, 21, 4):
            await days_later(kept, day, patch)
            last = await kept.say(f"d{day}", last)
        await days_later(kept, 24, patch)
        assert await kept.said(last) == "a A d4 D4 d8 D8 d12 D12 d16 D16 d20 D20"
        with pytest.raises(NotFound):
            await kept.history.load_response(alone, tenant=TENANT)
        await days_later(kept, 60, patch)
        with pytest.raises(InvalidRequest):
            await kept.said(last)
    await kept.store.sweep()
    assert await kept.store.keys() == []


async def test_what_a_branch_in_use_stands_on_is_not_deleted_under_it() -> None:
    kept = Kept(retention_s=10 * DAY_S)
    a = await kept.say("a")
    await kept.say("trunk", a)
    x = await kept.say("x", a)
    with pytest.MonkeyPatch.context() as patch:
        await days_later(kept, 8, patch)
        y = await kept.say("y", a)
        x2 = await kept.say("x2", x)
        await days_later(kept, 12, patch)  # the response of a is forgotten, its turn is not
        await kept.history.delete(y, tenant=TENANT)
        assert await kept.said(x2) == "a A x X x2 X2"


# --- damage, tenants, cost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"null", b"[]", b'{"id": 5}', b"\xff\xfe", b'{"line": "x", "depth": "0"}']
)
@pytest.mark.parametrize("kind", ["response", "turn"])
async def test_a_damaged_record_harms_itself_alone(kind: str, damage: bytes) -> None:
    kept = Kept()
    a, b = await kept.say("a"), await kept.say("b")
    [key] = [key for key in await kept.store.keys(f"{TENANT}/{kind}/") if a[5:] in key]
    await kept.store.put(key, damage)
    with pytest.raises(StackError) as caught:
        await kept.history.load_response(a, tenant=TENANT)
    assert (caught.value.status, caught.value.code) == (500, "storage_corrupt")
    with pytest.raises(StackError):
        await kept.history.load_history(a, tenant=TENANT)
    assert await kept.said(b) == "b B"
    assert await kept.said(await kept.say("c", b)) == "b B c C"


@CACHES
async def test_tenants_do_not_see_each_other(cache_bytes: int) -> None:
    kept = Kept(cache_bytes=cache_bytes)
    mine, theirs = await kept.say("a", item_id="one", tenant="t1"), await kept.say("b", item_id="one", tenant="t2")
    with pytest.raises(InvalidRequest):
        await kept.history.load_history(mine, tenant="t2")
    for wrong in (kept.history.load_response, kept.history.load_input_items, kept.history.delete):
        with pytest.raises(NotFound):
            await wrong(mine, tenant="t2")
    made = (await kept.history.load_response(mine, tenant="t1")).output[0].id
    assert made is not None
    assert await kept.find(made, tenant="t2") is None
    found = await kept.find("one", tenant="t2")
    assert found is not None
    assert orjson.loads(found.json)["content"] == "b"
    await kept.history.delete(theirs, tenant="t2")
    assert await kept.said(mine, tenant="t1") == "a A"


async def test_a_long_chain_costs_what_its_turns_cost_and_one_turn_costs_a_few_calls() -> None:
    kept = Kept()
    sizes: dict[int, int] = {}
    last = await kept.say("first")
    for number in range(1, 500):
        before = kept.store.calls
        last = await kept.say(f"turn {number:04d}", last)
        assert kept.store.calls - before <= 3
        if number in (249, 499):
            rows: Any = await Memory.scan(kept.store, "", limit=100_000)
            sizes[number] = sum(len(key) + len(entry.value) for key, entry in rows)
    print(f"{sizes[249]:,} bytes for 250 turns, {sizes[499]:,} for 500")
    assert sizes[499] < 2.05 * sizes[249]
    assert len((await kept.history.load_history(last, tenant=TENANT)).items) == 1000
    assert len(ITEM_LIST_ADAPTER.validate_json(bytes(await kept.history.load_input_items(last, tenant=TENANT)))) == 1


async def test_a_fork_costs_one_more_read() -> None:
    kept = Kept()
    last = await kept.say("a")
    for fork in range(5):
        before = kept.store.calls
        await kept.history.load_history(last, tenant=TENANT)
        assert kept.store.calls - before == 2 + fork
        await kept.say("trunk", last)
        last = await kept.say("branch", last)
        last = await kept.say("on", last)


async def test_a_chain_that_was_just_used_costs_one_read() -> None:
    kept = Kept(cache_bytes=10_000_000)
    last = await kept.say("b", await kept.say("a"))
    before = kept.store.calls
    assert await kept.said(last) == "a A b B"
    assert kept.store.calls - before == 1


async def test_the_json_of_a_stored_response_is_the_one_that_its_client_gets() -> None:
    kept, ids = Kept(), ResponseIds()
    tool: dict[str, Any] = {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "default": {"output": []}},
    }
    request = CreateResponse.model_validate({"model": "m", "input": "x", "tools": [tool], "metadata": {"output": "[]"}})
    output = ResponseOutput(ids)
    TurnStream(output, OfferedTools(request)).feed([TextDelta('a "output":[]'), Finish("stop", Usage())])
    begun = begin_response(request, ids.response_id, created_at=5)
    final = end_response(begun, "completed", output.finished_items(), Usage(1, 1))
    expected = json.loads(sdk_model_to_json(final))
    await kept.history.save(FinishedResponse(final, b"[]", {}), tenant=TENANT, history=LoadedHistory())
    remembered = remembered_json(final)
    assert remembered is not None
    assert json.loads(remembered) == expected
    stored = await kept.history.load_response(ids.response_id, tenant=TENANT)
    assert json.loads(sdk_model_to_json(stored)) == expected
