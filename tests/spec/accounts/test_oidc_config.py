"""The section of the provider `oidc`: mistakes that would admit the wrong people are errors at the start."""

from typing import Any

import pytest

from apis.accounts.limits import RateLimit
from providers.accounts.oidc.claims import tightest_limit
from providers.accounts.oidc.settings import OpenIDConfig
from tests.support.servers.issuer import AUDIENCE, oidc_section


def test_the_tightest_limit_has_the_smallest_number_of_each_field() -> None:
    limits = (RateLimit(day_tokens=5, minute_requests=0), RateLimit(day_tokens=7, month_tokens=1), RateLimit())
    assert tightest_limit(limits) == RateLimit(day_tokens=5, minute_requests=0, month_tokens=1)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"issuer": "http://login.example.com"}, "https"),
        ({"jwks_url": "http://login.example.com/jwks"}, "https"),
        ({"issuer": "ftp://login.example.com"}, "pattern"),
        ({"algorithms": ["HS256"]}, "RS256"),
        ({"algorithms": ["none"]}, "RS256"),
        ({"algorithms": []}, "at least 1"),
        ({"audience": []}, "at least 1"),
        ({"audience": ""}, "at least 1"),
        ({"tenant": {}}, "either"),
        ({"tenant": {"name": "a", "claim": "b"}}, "either"),
        ({"tenant": {"name": ".admin"}}, "begin with no dot"),
        ({"tenant": {"claim": "b", "values": {"x": ".admin"}}}, "begin with no dot"),
        ({"tenant": {"claim": "b", "values": {"x": "a/b"}}}, "begin with no dot"),
        ({"roles": {"claim": "b", "values": {"x": {"scopes": ["everything"]}}}}, "Unknown scope"),
        ({"roles": {"claim": "b", "values": {"x": {"scopes": []}}}}, "at least 1"),
        ({"roles": {"claim": "b", "values": {"x": {"scopes": "read", "limits": {"tokens": 5}}}}}, "max_tokens"),
        ({"keys_max_stale_s": 1}, "keys_max_age_s"),
        ({"leeway_s": 3600}, "300"),
        ({"sign_in": {}}, "client_id"),
        ({"sign_in": {"client_id": ""}}, "client_id"),
        ({"sign_in": {"client_id": "page"}}, "audience has not the client id"),
        ({"sign_in": {"client_id": AUDIENCE, "scopes": ["profile"]}}, "must have openid"),
        ({"sign_in": {"client_id": AUDIENCE, "scopes": "openid profile"}}, "list of scopes"),
        ({"sign_in": {"client_id": AUDIENCE, "token": "refresh_token"}}, "access_token"),
        ({"sign_in": {"client_id": AUDIENCE, "client_secret": "x"}}, "client_secret"),
    ],
)
def test_a_section_that_is_unsafe_or_says_nothing_is_refused(fields: dict[str, Any], problem: str) -> None:
    section = oidc_section("https://login.example.com")
    del section["provider"]
    OpenIDConfig.model_validate(section)
    with pytest.raises(ValueError, match=problem):
        OpenIDConfig.model_validate({**section, **fields})
