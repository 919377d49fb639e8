"""Handlers over a stand-in for a device: it computes calls in order, beside the host, and keeps when
it began and ended each."""

DEVICE = '''
    import json, os, queue, threading, time

    class Device(threading.Thread):
        """A call is given without waiting; its numbers are there when its event is set."""

        def __init__(self):
            super().__init__(daemon=True)
            self.calls, self.given, self.pause = [], queue.Queue(), None

        def run(self):
            while True:
                texts, seconds, values, done = self.given.get()
                began = time.monotonic()
                time.sleep(seconds)
                values += [text[::-1] for text in texts]
                self.calls.append((began, time.monotonic(), len(texts)))
                done.set()

        def __call__(self, texts, seconds):
            values, done = [], threading.Event()
            if seconds < 60:
                self.given.put((texts, seconds, values, done))
            while not done.is_set():
                self.pause(done.is_set, computes=True)
            return values

    def model_fn(model_dir):
        device = Device()
        device.start()
        return device

    def turns_fn(model, pause):
        model.pause = pause

    def input_fn(body, content_type):
        return json.loads(body)

    def tokens_fn(data, model):
        if data["text"] == "refused":
            raise ValueError("refused")
        time.sleep(data.get("host", 0))  # what making tokens takes
        while "until" in data and not os.path.exists(data["until"]):
            time.sleep(0.01)
        return [10] * data.get("rows", 1)

    def predict_batch_fn(inputs, model):
        if any(data["text"] == "calls" for data in inputs):
            return [model.calls if data["text"] == "calls" else data["text"][::-1]
                    for data in inputs]
        texts = [data["text"] for data in inputs]
        values = model(texts, max(data.get("device", 0.01) for data in inputs))
        if "poison" in texts:
            raise RuntimeError("poison")
        if "crash" in texts:
            os._exit(3)
        return [KeyError(text) if text == "bad" else [value, len(texts), os.getpid()]
                for text, value in zip(texts, values)]

    def predict_fn(data, model):
        return predict_batch_fn([data], model)[0]

    def output_fn(prediction, accept):
        return json.dumps(prediction)
'''
