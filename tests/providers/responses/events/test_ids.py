"""Ids of items: they name the response, the number of the item in it, and the turn of the model."""

import pytest

from providers.responses.events.ids import ModelTurn, ResponseIds, item_number, response_id_of, turn_of


@pytest.mark.parametrize("turn", [0, 1, 15, 0xFFFF])
@pytest.mark.parametrize("number", [0, 3, 0xFFFF])
def test_an_id_names_its_response_its_number_and_its_turn(number: int, turn: int) -> None:
    ids = ResponseIds(item_id_count=number)
    ids.turn = turn
    item_id = ids.new_item_id("msg")
    assert (response_id_of(item_id), item_number(item_id)) == (ids.response_id, number)
    assert turn_of(item_id) == ModelTurn(ids.response_id.removeprefix("resp_"), turn)
    assert len(item_id) <= 64


@pytest.mark.parametrize(("number", "turn"), [(0x10000, 3), (0xFFFFFF, 3), (3, 0x10000)])
def test_an_id_beyond_what_it_can_name_still_names_its_response_and_number(number: int, turn: int) -> None:
    ids = ResponseIds(item_id_count=number)
    ids.turn = turn
    item_id = ids.new_item_id("fc")
    assert (response_id_of(item_id), item_number(item_id)) == (ids.response_id, number)


def test_an_id_that_a_client_chose_names_no_turn() -> None:
    assert turn_of("ws_mine") is None
    assert turn_of("") is None


def test_turns_differ_by_number_and_by_response_where_both_are_known() -> None:
    turn = ModelTurn("a", 1)
    assert [turn.differs(other) for other in (None, turn, ModelTurn("", 1), ModelTurn("", 2), ModelTurn("b", 1))] == [
        *(False, False, False, True, True),
    ]
    assert not ModelTurn("", 1).differs(turn)
