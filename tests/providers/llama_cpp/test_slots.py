"""SlotTable: which slot a prompt gets, and whose cache it may use."""

from providers.inference.llama_cpp.slots import COMPARE_TOKENS, SlotTable

SYSTEM = [*range(100)]


def prompt(chat: int, *turns: int) -> list[int]:
    """Return the ids of a chat with the shared instructions."""
    return [*SYSTEM, *(1000 * chat + turn for turn in turns)]


def use(table: SlotTable, ids: list[int], salt: str | None = None, output_tokens: int = 5) -> tuple[int, bool]:
    """Lease and release a slot for the prompt."""
    lease = table.lease(ids, len(ids), salt)
    table.release(lease, output_tokens)
    return lease.number, lease.may_reuse


def test_chats_with_equal_instructions_keep_their_slots() -> None:
    table = SlotTable(3, shares_cache=True)
    slots = [use(table, prompt(chat, 1))[0] for chat in range(3)]
    assert len({*slots}) == 3
    for turns in ((1, 2), (1, 2, 3)):
        assert [use(table, prompt(chat, *turns))[0] for chat in (2, 0, 1)] == [slots[2], slots[0], slots[1]]


def test_a_new_chat_takes_the_slot_that_was_used_the_longest_ago() -> None:
    table = SlotTable(2, shares_cache=True)
    first, second = use(table, prompt(1, 1))[0], use(table, prompt(2, 1))[0]
    use(table, prompt(1, 1, 2))
    assert use(table, prompt(3, 1)) == (second, True)
    assert use(table, prompt(1, 1, 2, 3))[0] == first


def test_a_slot_in_use_is_not_leased() -> None:
    table = SlotTable(2, shares_cache=False)
    running = table.lease(prompt(1, 1), 101, None)
    assert use(table, prompt(1, 1, 2))[0] != running.number


def test_reasoning_that_is_dropped_after_the_last_user_message_is_the_same_chat() -> None:
    table = SlotTable(2, shares_cache=True)
    lease = table.lease(prompt(1, 1, 2, 3), len(prompt(1, 1)), None)
    table.release(lease, 5)
    use(table, prompt(2, 1))
    assert use(table, prompt(1, 1, 9, 10))[0] == lease.number


def test_salts_do_not_share() -> None:
    table = SlotTable(1, shares_cache=False)
    assert [use(table, prompt(1, 1), salt)[1] for salt in ("a", "a", "b", None, None)] == [
        *(False, True, False),
        *(False, True),
    ]


def test_a_salted_prompt_reuses_no_slot_that_the_engine_would_replace() -> None:
    table = SlotTable(1, shares_cache=True)
    use(table, prompt(1, 1), "a", output_tokens=50)
    assert use(table, prompt(1, 1, 2), "a", output_tokens=500) == (0, True)
    assert use(table, prompt(1, 1, 2, 3), "a") == (0, False)


def test_long_prompts_are_compared_to_the_token() -> None:
    table = SlotTable(2, shares_cache=True)
    long = [*range(5 * COMPARE_TOKENS)]
    use(table, long)
    other = [*long[:-1], 7]
    assert use(table, other)[0] == 1
    assert use(table, [*long, 8])[0] == 0
