"""A server (FastAPI): one compiled model, called by several threads with batches of several sizes.

Run `uvicorn examples.serving:app` to serve it; run as a program, it calls itself.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from torch import nn

import fusewright

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3)).eval()
compiled = fusewright.compile(model, dynamic=True)
with torch.inference_mode():
    compiled(torch.zeros(2, 8))  # compile before the first request
app = FastAPI()


@app.post("/predict")
def predict(rows: list[list[float]]) -> list[list[float]]:  # not `async`: FastAPI calls it on a thread of its own
    with torch.inference_mode():
        return compiled(torch.tensor(rows)).tolist()


if __name__ == "__main__":
    client = TestClient(app)
    batches = [torch.randn(size, 8) for size in (2, 3, 5, 8) * 4]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda rows: client.post("/predict", json=rows.tolist()).json(), batches))
    for rows, answer in zip(batches, answers, strict=True):
        torch.testing.assert_close(torch.tensor(answer), model(rows).detach(), rtol=1e-4, atol=1e-4)
    print(f"{len(answers)} answers of 4 threads are right")
