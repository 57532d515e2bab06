/* Lets the search run where pages are opened from a folder, for which browsers refuse workers: the worker's script runs
   in a hidden frame instead. Stands in for the script that the theme would fetch from another host. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      this.ready = new Promise((resolve) => {
        inside.document.open()
        inside.importScripts = (...urls) =>
          urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve())
        inside.postMessage = (data) => {
          const event = new MessageEvent("message", { data: structuredClone(data) })
          this.dispatchEvent(event)
          if (this.onmessage) this.onmessage(event)
        }
        inside.document.write("<html><body></body></html>")
        inside.document.close()
        this.load(new URL(url, document.baseURI).href).then(resolve)
      })
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        this.frame.contentDocument.body.appendChild(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow
        inside.dispatchEvent(new inside.MessageEvent("message", { data: inside.structuredClone(data) }))
      })
    }
    terminate() {
      this.frame.remove()
    }
  }
}
