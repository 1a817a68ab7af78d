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
from providers.responses.store.history import LoadedHistory
from providers.responses.store.history_cache import LoadAllowance
from providers.responses.store.turn_writer import FinishedResponse
from providers.responses.tools.offered import OfferedTools
from tests.providers.responses.store.kept import CACHES, DAY_S, TENANT, Kept, days_later

# --- chains ----------------------------------------------------------------------------------------------------------


@CACHES
async def test_a_chain_is_read_in_the_order_it_was_said(cache_bytes: int) -> None:
    stored = Kept(cache_bytes=cache_bytes)
    a = await stored.say("a")
    b = await stored.say("b", a)
    c = await stored.say("c", b)
    assert [await stored.said(each) for each in (a, b, c)] == ["a A", "a A b B", "a A b B c C"]


@CACHES
async def test_branches_and_branches_of_branches_are_their_own(cache_bytes: int) -> None:
    stored = Kept(cache_bytes=cache_bytes)
    a = await stored.say("a")
    b = await stored.say("b", a)
    c = await stored.say("c", b)
    x = await stored.say("x", a)
    y = await stored.say("y", x)
    z = await stored.say("z", x)
    z2 = await stored.say("z2", z)
    other = await stored.say("other", c)
    assert await stored.said(c) == "a A b B c C"
    assert await stored.said(y) == "a A x X y Y"
    assert await stored.said(z2) == "a A x X z Z z2 Z2"
    assert await stored.said(other) == "a A b B c C other OTHER"


@CACHES
async def test_two_that_follow_one_turn_at_once_both_stand(cache_bytes: int) -> None:
    stored = Kept(cache_bytes=cache_bytes)
    a = await stored.say("a")
    past = await stored.history.load_history(a, tenant=TENANT)
    b = await stored.save("b", past)
    c = await stored.save("c", past)
    assert await stored.said(b) == "a A b B"
    assert await stored.said(c) == "a A c C"


@CACHES
async def test_results_of_tools_are_stored_with_the_chain(cache_bytes: int) -> None:
    stored = Kept(cache_bytes=cache_bytes)
    b = await stored.say("b", await stored.say("a"))
    past = await stored.history.load_history(b, tenant=TENANT)
    assert sorted(result.output for result in past.tool_results.values()) == ["told a", "told b"]


@pytest.mark.parametrize("response_id", ["resp_" + "0" * 32, "resp_\0", "😀" * 256, "a/b"])
async def test_the_error_for_an_unknown_response_names_its_field(response_id: str) -> None:
    stored = Kept()
    with pytest.raises(InvalidRequest) as caught:
        await stored.history.load_history(response_id, tenant=TENANT)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(NotFound):
        await stored.history.load_response(response_id, tenant=TENANT)
    with pytest.raises(NotFound):
        await stored.history.delete(response_id, tenant=TENANT)


async def test_a_chain_is_followed_so_far_and_no_further() -> None:
    stored = Kept(max_turns=3)
    c = await stored.say("c", await stored.say("b", await stored.say("a")))
    assert await stored.said(c) == "a A b B c C"
    d = await stored.say("d", c)
    with pytest.raises(InvalidRequest, match="longer than 3 turns"):
        await stored.said(d)
    x = await stored.save("x", await stored.history.load_history(c, tenant=TENANT))  # a branch, whose line is short
    with pytest.raises(InvalidRequest, match="longer than 3 turns"):
        await stored.said(x)


async def test_a_circle_put_there_by_hand_ends() -> None:
    stored = Kept(max_turns=50)
    a = await stored.say("a")
    b = await stored.say("b", a)
    x = await stored.say("x", a)
    key = f"{TENANT}/turn/{x[5:]}/00000000"
    entry = await stored.store.get(key)
    assert entry is not None
    turn = orjson.loads(entry.value)
    turn["fork_point"] = [x[5:], 0]
    await stored.store.put(key, orjson.dumps(turn))
    with pytest.raises(InvalidRequest):
        await stored.said(x)
    assert await stored.said(b) == "a A b B"


# --- one response ----------------------------------------------------------------------------------------------------


async def test_a_response_is_read_as_it_was_saved() -> None:
    stored = Kept()
    a = await stored.say("a")
    response = await stored.history.load_response(a, tenant=TENANT)
    assert (response.id, response.status, response.output_text) == (a, "completed", "A")
    input_items = orjson.loads(bytes(await stored.history.load_input_items(a, tenant=TENANT)))
    assert [item["content"] for item in input_items] == ["a"]


@pytest.mark.parametrize("item_id", ["mine", "fco_0123", "😀" * 256, "a/b", "msg_" + "x" * 252])
async def test_an_item_is_found_by_the_id_that_its_client_gave(item_id: str) -> None:
    stored = Kept()
    a = await stored.say("a", item_id=item_id)
    items = await stored.find(item_id)
    assert items is not None
    assert orjson.loads(items.json)["content"] == "a"
    assert await stored.find(item_id, tenant="other") is None
    await stored.history.delete(a, tenant=TENANT)
    assert await stored.find(item_id) is None
    assert not await stored.store.keys()


async def test_a_stored_item_is_found_with_its_result() -> None:
    stored = Kept()
    a = await stored.say("a")
    response = await stored.history.load_response(a, tenant=TENANT)
    item_id = response.output[0].id
    assert item_id is not None
    items = await stored.find(item_id)
    assert items is not None
    assert items.tool_result is not None
    assert items.tool_result.output == "told a"
    assert await stored.find(item_id[:-1] + "9") is None


async def test_items_of_one_turn_are_found_in_a_few_reads() -> None:
    """The number of reads, and the items that are decoded, do not grow with items times size of the turn."""
    stored = Kept()
    items = [{"type": "message", "role": "user", "content": "x" * 100, "id": f"mine{number}"} for number in range(256)]
    await stored.save_items(items)
    stored.store.calls = 0
    loaded_items = await stored.history.find_items(
        {f"mine{number}": f"input[{number}].id" for number in range(256)} | {"none": "input[256].id"},
        tenant=TENANT,
        allowance=LoadAllowance(100_000),
    )
    assert [orjson.loads(each.json)["id"] for each in loaded_items.values()] == [item["id"] for item in items]
    assert stored.store.calls <= 4


async def test_unknown_items_are_looked_for_in_a_few_reads() -> None:
    """Ids that nothing is stored of cost no read each."""
    stored = Kept()
    ids = ResponseIds()
    params = {ids.new_item_id("fs"): "input[0].id" for _ in range(100)}
    assert not await stored.history.find_items(params, tenant=TENANT, allowance=LoadAllowance(1))
    assert stored.store.calls <= 4


@CACHES
async def test_turns_that_are_looked_up_count_for_what_a_request_may_load(cache_bytes: int) -> None:
    """A turn counts once, however many of its items are asked for."""
    stored = Kept(cache_bytes=cache_bytes)
    items = [{"type": "message", "role": "user", "content": "x" * 900, "id": f"mine{number}"} for number in range(4)]
    await stored.save_items(items)
    params = {f"mine{number}": f"input[{number}].id" for number in range(4)}
    assert len(await stored.history.find_items(params, tenant=TENANT, allowance=LoadAllowance(8000))) == 4
    with pytest.raises(InvalidRequest) as caught:
        await stored.history.find_items(params, tenant=TENANT, allowance=LoadAllowance(8000, 6000))
    assert (caught.value.param, caught.value.code) == ("input[0].id", "history_too_large")


# --- forgetting ------------------------------------------------------------------------------------------------------


@CACHES
async def test_a_deleted_response_is_unknown_and_later_turns_keep_it(cache_bytes: int) -> None:
    stored = Kept(cache_bytes=cache_bytes)
    a = await stored.say("a")
    b = await stored.say("b", a)
    await stored.history.delete(a, tenant=TENANT)
    with pytest.raises(NotFound):
        await stored.history.load_response(a, tenant=TENANT)
    with pytest.raises(InvalidRequest):
        await stored.history.load_history(a, tenant=TENANT)
    with pytest.raises(NotFound):
        await stored.history.delete(a, tenant=TENANT)
    assert await stored.said(b) == "a A b B"
    assert await stored.said(await stored.say("c", b)) == "a A b B c C"


@pytest.mark.parametrize("order", ["abcxyz", "zyxcba", "bcaxzy", "xyzabc", "cazbyx", "ybxazc"])
@CACHES
async def test_no_record_is_left_once_all_are_deleted_in_any_order(order: str, cache_bytes: int) -> None:
    stored = Kept(cache_bytes=cache_bytes)
    ids: dict[str, str] = {}
    for name, after in (("a", ""), ("b", "a"), ("c", "b"), ("x", "a"), ("y", "x"), ("z", "x")):
        ids[name] = await stored.say(name, ids.get(after))
    expected = {"a": "a A", "b": "a A b B", "c": "a A b B c C", "x": "a A x X", "y": "a A x X y Y", "z": "a A x X z Z"}
    for number, name in enumerate(order):
        await stored.history.delete(ids[name], tenant=TENANT)
        for rest in order[number + 1 :]:
            assert await stored.said(ids[rest]) == expected[rest]
    assert await stored.store.keys() == []


async def test_a_chain_in_use_is_kept_and_one_that_is_not_is_forgotten() -> None:
    stored = Kept(retention_s=10 * DAY_S)
    last = await stored.say("a")
    alone = await stored.say("alone")
    with pytest.MonkeyPatch.context() as patch:
        for day in range(4, 21, 4):
            await days_later(stored, day, patch)
            last = await stored.say(f"d{day}", last)
        await days_later(stored, 24, patch)
        assert await stored.said(last) == "a A d4 D4 d8 D8 d12 D12 d16 D16 d20 D20"
        with pytest.raises(NotFound):
            await stored.history.load_response(alone, tenant=TENANT)
        await days_later(stored, 60, patch)
        with pytest.raises(InvalidRequest):
            await stored.said(last)
    await stored.store.sweep()
    assert await stored.store.keys() == []


async def test_turns_that_a_branch_in_use_needs_are_not_deleted() -> None:
    stored = Kept(retention_s=10 * DAY_S)
    a = await stored.say("a")
    await stored.say("trunk", a)
    x = await stored.say("x", a)
    with pytest.MonkeyPatch.context() as patch:
        await days_later(stored, 8, patch)
        y = await stored.say("y", a)
        x2 = await stored.say("x2", x)
        await days_later(stored, 12, patch)  # the response of a is forgotten, its turn is not
        await stored.history.delete(y, tenant=TENANT)
        assert await stored.said(x2) == "a A x X x2 X2"


# --- damage, tenants, cost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"null", b"[]", b'{"id": 5}', b"\xff\xfe", b'{"line": "x", "depth": "0"}']
)
@pytest.mark.parametrize("kind", ["response", "turn"])
async def test_a_damaged_record_harms_itself_alone(kind: str, damage: bytes) -> None:
    stored = Kept()
    a, b = await stored.say("a"), await stored.say("b")
    [key] = [key for key in await stored.store.keys(f"{TENANT}/{kind}/") if a[5:] in key]
    await stored.store.put(key, damage)
    with pytest.raises(StackError) as caught:
        await stored.history.load_response(a, tenant=TENANT)
    assert (caught.value.status, caught.value.code) == (500, "storage_corrupt")
    with pytest.raises(StackError):
        await stored.history.load_history(a, tenant=TENANT)
    assert await stored.said(b) == "b B"
    assert await stored.said(await stored.say("c", b)) == "b B c C"


@CACHES
async def test_tenants_do_not_see_each_other(cache_bytes: int) -> None:
    stored = Kept(cache_bytes=cache_bytes)
    mine, theirs = await stored.say("a", item_id="one", tenant="t1"), await stored.say("b", item_id="one", tenant="t2")
    with pytest.raises(InvalidRequest):
        await stored.history.load_history(mine, tenant="t2")
    for wrong in (stored.history.load_response, stored.history.load_input_items, stored.history.delete):
        with pytest.raises(NotFound):
            await wrong(mine, tenant="t2")
    item_id = (await stored.history.load_response(mine, tenant="t1")).output[0].id
    assert item_id is not None
    assert await stored.find(item_id, tenant="t2") is None
    items = await stored.find("one", tenant="t2")
    assert items is not None
    assert orjson.loads(items.json)["content"] == "b"
    await stored.history.delete(theirs, tenant="t2")
    assert await stored.said(mine, tenant="t1") == "a A"


async def test_a_long_chain_costs_what_its_turns_cost_and_one_turn_costs_a_few_calls() -> None:
    stored = Kept()
    sizes: dict[int, int] = {}
    last = await stored.say("first")
    for number in range(1, 200):
        before = stored.store.calls
        last = await stored.say(f"turn {number:04d}", last)
        assert stored.store.calls - before <= 3
        if number in (99, 199):
            rows: Any = await Memory.scan(stored.store, "", limit=100_000)
            sizes[number] = sum(len(key) + len(entry.value) for key, entry in rows)
    print(f"{sizes[99]:,} bytes for 100 turns, {sizes[199]:,} for 200")
    assert sizes[199] < 2.05 * sizes[99]
    assert len((await stored.history.load_history(last, tenant=TENANT)).items) == 400
    assert len(ITEM_LIST_ADAPTER.validate_json(bytes(await stored.history.load_input_items(last, tenant=TENANT)))) == 1


async def test_a_fork_costs_one_more_read() -> None:
    stored = Kept()
    last = await stored.say("a")
    for fork in range(5):
        before = stored.store.calls
        await stored.history.load_history(last, tenant=TENANT)
        assert stored.store.calls - before == 2 + fork
        await stored.say("trunk", last)
        last = await stored.say("branch", last)
        last = await stored.say("on", last)


async def test_a_chain_that_was_just_used_costs_one_read() -> None:
    stored = Kept(cache_bytes=10_000_000)
    last = await stored.say("b", await stored.say("a"))
    before = stored.store.calls
    assert await stored.said(last) == "a A b B"
    assert stored.store.calls - before == 1


async def test_the_json_of_a_stored_response_is_the_one_that_its_client_gets() -> None:
    store, ids = Kept(), ResponseIds()
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
    await store.history.save(FinishedResponse(final, b"[]", {}), tenant=TENANT, history=LoadedHistory())
    remembered = remembered_json(final)
    assert remembered is not None
    assert json.loads(remembered) == expected
    stored = await store.history.load_response(ids.response_id, tenant=TENANT)
    assert json.loads(sdk_model_to_json(stored)) == expected
