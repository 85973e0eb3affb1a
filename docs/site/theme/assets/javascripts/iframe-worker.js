// A page that is opened from a folder may not start a worker. There, the search's program runs in a frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(program) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.isReady = new Promise(resolve => {
        const script = this.inside.document.createElement("script");
        script.onload = resolve;
        script.src = program;
        this.inside.document.body.append(script);
      });
    }
    postMessage(data) {
      this.isReady.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
