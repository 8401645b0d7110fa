"""Flask: handlers enqueue tasks, which `omniq worker web_tasks` runs.

flask --app flask_app run
curl -X POST localhost:5000/welcome/ann
"""

from __future__ import annotations

import web_tasks
from flask import Flask

from omniq.integrations.flask import Omniq

app = Flask(__name__)
omniq = Omniq(app)


@app.post("/welcome/<name>")
def welcome(name: str) -> dict[str, str]:
    handle = omniq.queue.enqueue(web_tasks.welcome, name)
    return {"id": handle.id, "said": handle.result(timeout=20)}
