"""An identity provider for pages: oidc-provider-mock with the parts that a public client in a browser needs.

It checks PKCE (RFC 7636), lets any origin read its token endpoint (CORS), returns an ID token for a refresh token,
which counts once, and redirects with the `state`; its access tokens may be JWTs. It is a program of its own, with its
options as JSON.
"""

import base64
import hashlib
import json
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import flask
import jwt
import uvicorn
from authlib import jose
from authlib.oauth2.rfc6749 import AuthorizationCodeGrant, RefreshTokenGrant
from oidc_provider_mock import (  # pyright: ignore[reportMissingTypeStubs] - it has types, but no mark that says so
    User,
    app,
)


def build_app(options: dict[str, Any]) -> flask.Flask:
    people = [User(sub=claims.pop("sub"), claims=claims) for claims in options["people"]]
    life = timedelta(seconds=options["life_s"])
    provider = app(user_claims=people, access_token_max_age=life, issue_refresh_token=options["refreshes"])
    challenges: dict[str, str] = {}
    calls: list[dict[str, str]] = []

    @provider.before_request
    def check_client() -> Any:
        request = flask.request
        if request.path == "/oauth2/authorize" and request.args.get("code_challenge_method") != "S256":
            return "PKCE is required", 400
        if request.path == "/oauth2/token":
            calls.append({**request.form.to_dict(), "origin": request.headers.get("origin", "")})
            if request.form["grant_type"] == "authorization_code":
                digest = hashlib.sha256(request.form.get("code_verifier", "").encode()).digest()
                verified = base64.urlsafe_b64encode(digest).decode().rstrip("=")
                if challenges.pop(request.form["code"], None) != verified:
                    return {"error": "invalid_grant", "error_description": "<b>The verifier</b> is wrong"}, 400
        return None

    @provider.get("/calls")
    def list_calls() -> Any:
        """Return the fields of each request to the token endpoint, with its origin."""
        return flask.jsonify(calls)

    @provider.after_request
    def complete(response: flask.Response) -> flask.Response:
        request = flask.request
        if request.path == "/oauth2/token":
            response.headers["access-control-allow-origin"] = request.headers.get("origin", "null")
            if request.form["grant_type"] == "refresh_token" and response.status_code == 200:
                response.set_data(json.dumps({**response.get_json(), "id_token": _renewed_id_token(life)}))
            if options["access_audience"] and response.status_code == 200:
                answer = response.get_json()
                answer["access_token"] = _access_token(answer.pop("id_token"), options["access_audience"])
                response.set_data(json.dumps(answer))
        elif request.path == "/oauth2/authorize" and response.location:
            answer = {name: values[0] for name, values in parse_qs(urlsplit(response.location).query).items()}
            if "code" in answer:
                challenges[answer["code"]] = request.args["code_challenge"]
            else:  # the parameter that it forgets where the person says no
                answer = {**answer, **options["denial"], "state": request.args["state"]}
                response.location = f"{request.args['redirect_uri']}?{urlencode(answer)}"
        return response

    return provider


def _renewed_id_token(life: timedelta) -> str:
    storage = flask.g.oidc_provider_mock_storage
    old = storage.remove_refresh_token(flask.request.form["refresh_token"])
    user, now = storage.get_user(old.user_id), datetime.now(UTC)
    claims = {
        "iss": flask.request.host_url.rstrip("/"),
        "aud": old.client_id,
        "sub": user.sub,
        "iat": int(now.timestamp()),
        "exp": int((now + life).timestamp()),
        **user.claims,
    }
    return _sign(claims)


def _access_token(id_token: str, audience: str) -> str:
    """An access token of the same person for another audience (RFC 9068)."""
    claims: dict[str, Any] = jwt.decode(id_token, options={"verify_signature": False})
    return _sign({**claims, "aud": audience})


def _sign(claims: dict[str, Any]) -> str:
    jose_jwt: Any = jose.jwt
    return jose_jwt.encode({"alg": "RS256"}, claims, flask.g.oidc_provider_mock_storage.jwk).decode()


if __name__ == "__main__":
    options: dict[str, Any] = json.loads(sys.argv[1])
    os.environ["AUTHLIB_INSECURE_TRANSPORT"] = "1"
    for grant in (AuthorizationCodeGrant, RefreshTokenGrant):
        grant.TOKEN_ENDPOINT_AUTH_METHODS = ["none"]  # a page has no secret
    RefreshTokenGrant.INCLUDE_NEW_REFRESH_TOKEN = True
    uvicorn.run(build_app(options), interface="wsgi", port=options["port"], log_level="error")
