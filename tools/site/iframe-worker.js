/* Browsers refuse workers on pages that are opened as files. Search then runs in a hidden frame of the page, which has
   the interface of a worker. Named so that the offline plugin of MkDocs Material does not add one from the network. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const waiting = [];
      let ready = false;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      const send = (data) => frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      this.postMessage = (data) => (ready ? send(data) : waiting.push(data));
      this.terminate = () => frame.remove();
      frame.addEventListener("load", () => {
        const script = frame.contentDocument.createElement("script");
        frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        script.src = url;
        script.addEventListener("load", () => {
          ready = true;
          waiting.forEach(send);
        });
        frame.contentDocument.body.append(script);
      }, { once: true });
      const place = () => document.body.append(frame);
      document.body ? place() : addEventListener("DOMContentLoaded", place);
    }
  };
}
