"""Computer use: the tools, the actions that a model asks the client's computer for, and the items that carry them."""

from typing import Annotated, Final, Literal

from pydantic import Field

from apis.wire.base import ToolWire
from apis.wire.item_parts import CallId, InputImage, ItemId, ItemStatus, ItemWire

COMPUTER_CHOICES: Final = ("computer", "computer_use", "computer_use_preview")
MAX_ACTIONS = 100
"""Maximum actions of one call."""


class ComputerTool(ToolWire):
    """A computer that the client controls. One call holds several actions; the client answers with a screenshot."""

    type: Literal["computer"]
    runs_at_client = True

    @classmethod
    def choice_names(cls) -> tuple[str, ...]:
        return COMPUTER_CHOICES


class ComputerUsePreviewTool(ToolWire):
    """The earlier form of the tool: one action for each call, on a display of this size in pixels."""

    type: Literal["computer_use_preview"]
    display_width: int = Field(ge=1, le=100_000)
    display_height: int = Field(ge=1, le=100_000)
    environment: Literal["windows", "mac", "linux", "ubuntu", "browser"]
    runs_at_client = True

    @classmethod
    def choice_names(cls) -> tuple[str, ...]:
        return COMPUTER_CHOICES


class ClickAction(ItemWire):
    type: Literal["click"]
    button: Literal["left", "right", "wheel", "back", "forward"]
    x: int
    y: int
    keys: list[str] | None = None


class DoubleClickAction(ItemWire):
    type: Literal["double_click"]
    x: int
    y: int
    keys: list[str] | None = None


class DragPoint(ItemWire):
    x: int
    y: int


class DragAction(ItemWire):
    type: Literal["drag"]
    path: list[DragPoint]
    keys: list[str] | None = None


class KeypressAction(ItemWire):
    type: Literal["keypress"]
    keys: list[str]


class MoveAction(ItemWire):
    type: Literal["move"]
    x: int
    y: int
    keys: list[str] | None = None


class ScreenshotAction(ItemWire):
    type: Literal["screenshot"]


class ScrollAction(ItemWire):
    type: Literal["scroll"]
    x: int
    y: int
    scroll_x: int
    scroll_y: int
    keys: list[str] | None = None


class TypeAction(ItemWire):
    type: Literal["type"]
    text: str


class WaitAction(ItemWire):
    type: Literal["wait"]


ComputerAction = Annotated[
    ClickAction
    | DoubleClickAction
    | DragAction
    | KeypressAction
    | MoveAction
    | ScreenshotAction
    | ScrollAction
    | TypeAction
    | WaitAction,
    Field(discriminator="type"),
]


class SafetyCheck(ItemWire):
    id: str
    code: str | None = None
    message: str | None = None


class ComputerCallItem(ItemWire):
    """A call of a computer: `actions`, or the one `action` of the preview."""

    type: Literal["computer_call"]
    id: ItemId | None = None
    call_id: CallId
    status: ItemStatus | None = None
    action: ComputerAction | None = None
    actions: list[ComputerAction] | None = Field(None, max_length=MAX_ACTIONS)
    pending_safety_checks: list[SafetyCheck] | None = None


class ComputerScreenshot(InputImage):
    """A screenshot by URL (https or data) or by the id of an uploaded file. `input_image` is the type that the first
    clients of the preview send."""

    type: Literal["computer_screenshot", "input_image"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so never written


class ComputerCallOutput(ItemWire):
    """The screen after the actions of a call."""

    type: Literal["computer_call_output"]
    id: ItemId | None = None
    call_id: CallId
    status: Literal["in_progress", "completed", "incomplete", "failed"] | None = None
    output: ComputerScreenshot
    acknowledged_safety_checks: list[SafetyCheck] | None = None
