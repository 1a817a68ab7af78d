"""/v1/batches: create, read, list and cancel batches of requests."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.batches.batches import BatchListParams, CreateBatch
from apis.errors import PermissionDenied
from providers.batches.leased import LeasedBatches
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.parsing import read_request
from stack.http.request_body import read_body
from stack.http.route import RESPONSES, Route
from stack.http.routes.calls import ApiCalls


async def create_batch(http: Request, context: HttpContext, services: Services) -> Response:
    # what the key may use is checked for each line, when it is executed
    request = await read_request(await read_body(http), CreateBatch)
    key_id, accounts = context.caller.key_id, services.stack.accounts
    if context.caller.expires_at is not None and await accounts.find_caller(context.tenant, key_id) is None:
        raise PermissionDenied(
            "The lines of a batch are executed later with the rights of their key, which a token has not: create "
            "batches with a stored key of the project."
        )
    batches = _require_batches(services)
    return value_response(await batches.create(request, tenant=context.tenant, key_id=key_id))


def _require_batches(services: Services) -> LeasedBatches:
    return require_section(services.stack.batches, "keeps no files", "files")


_batches = ApiCalls(_require_batches)
list_batches = _batches.calling("list_batches", lambda batches: batches.list)
get_batch = _batches.calling("get_batch", lambda batches: batches.get)
cancel_batch = _batches.calling("cancel_batch", lambda batches: batches.cancel)

BATCH_ROUTES: Final = (
    Route("POST", "/batches", RESPONSES, create_batch, body=CreateBatch, stores=True),
    Route("GET", "/batches", RESPONSES, list_batches, query=BatchListParams),
    Route("GET", "/batches/{batch_id}", RESPONSES, get_batch),
    Route("POST", "/batches/{batch_id}/cancel", RESPONSES, cancel_batch, stores=False),
)
