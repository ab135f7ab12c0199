"""Models over HTTP: `insertlm serve`. See docs/serving.md.

limits.py      what a request may ask for, and how many there may be
worker.py      a thread for each model, which writes all of its texts together
requests.py    a request at work, as the event loop sees it
registry.py    the models that are served, and what is asked of them
schemas.py     what goes in and out, as types
errors.py      what can go wrong, as status codes
middleware.py  what every request passes: the key, its size, the count of it
metrics.py     numbers for Prometheus
routes.py      /v1/infill, /v1/solve, /v1/graphs/example
compatible.py  the shapes other servers have: /v1/completions (OpenAI) and /infill (llama.cpp)
app.py       all of this put together
page/        the page at /, and that at /docs
"""
