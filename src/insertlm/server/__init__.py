"""Models over HTTP: `insertlm serve`. See docs/serving.md.

app.py         the app: routes, middleware and static files put together
routes.py      /v1/infill, /v1/solve, /v1/graphs/example
compatible.py  routes in the format of other servers: /v1/completions (OpenAI) and /infill (llama.cpp)
schemas.py     the bodies of requests and answers, as pydantic types
connections.py connections on which no request comes
middleware.py  what every request passes through: host, API key, size limit, headers, metrics
hosts.py       the names that a server answers to
errors.py      errors as status codes
limits.py      how much a request may ask for, and how many may run
registry.py    the models that are served
requests.py    a request whose texts are being written
worker.py      a thread for each model, which writes all of its texts together
metrics.py     metrics for Prometheus
page/          the page at /, and the one at /docs

May import model and all below it.
"""
