"""An HTTP service with an OpenAPI description, for tests: `python -m tests.envs.lamp_service PORT`.

With a second argument it has no operation `reset`.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

LAMPS = {"hall": False, "attic": True}
ROOM = {"name": "room", "in": "path", "required": True, "schema": {"type": "string"}}
OK = {"200": {"description": "done"}}
SPEC = {
    "openapi": "3.1.0",
    "info": {"title": "Lamps", "version": "1"},
    "paths": {
        "/reset": {"post": {"operationId": "reset_reset_post", "responses": OK}},
        "/lamps": {"get": {"operationId": "lamps", "summary": "List lamps.", "responses": OK}},
        "/lamps/{room}/switch": {
            "post": {
                "operationId": "switch_lamps__room__switch_post",
                "summary": "Switch a lamp.",
                "parameters": [ROOM],
                "responses": OK,
            }
        },
    },
}


class Handler(BaseHTTPRequestHandler):
    lamps = dict(LAMPS)

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(SPEC if self.path == "/openapi.json" else self.lamps)

    def do_POST(self):
        found = re.fullmatch("/lamps/(.*)/switch", self.path)
        if self.path == "/reset":
            self.lamps.update(LAMPS)
            self.answer("ok")
        elif found and found[1] in self.lamps:
            self.lamps[found[1]] = not self.lamps[found[1]]
            self.answer({found[1]: self.lamps[found[1]]})
        else:
            self.answer({"detail": "there is no such lamp"}, 404)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    if len(sys.argv) > 2:
        del SPEC["paths"]["/reset"]
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
