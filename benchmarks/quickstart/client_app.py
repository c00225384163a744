"""A client as in Flower's tutorials: take the arrays, train, send the arrays back."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import build, load, train

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    net = build()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = load(str(context.node_config["data-path"]))
    loss = train(net, x, y)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
