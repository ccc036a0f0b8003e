"use strict";
// Puts what the server sends of a page that is open into it. Each event is a list of {id, html, how}: new content of the
// element with this id. A hidden tab lets its connection go, because a browser opens only six to a host.
(() => {
  const url = document.body.dataset.live;
  const line = document.getElementById("connection");
  if (!url || !line) return;
  let source = null;
  let again = 0;
  const say = (words) => { if (line.textContent !== words) line.textContent = words; };
  const keep = {
    // What the reader has opened, ticked, or is writing, stays.
    beforeAttributeUpdated: (name, node) => !(name === "checked" || (name === "open" && node.tagName === "DETAILS")),
  };
  function put({ id, html, how }) {
    const place = document.getElementById(id);
    if (!place) return;
    if (how === "append") {
      const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 30;
      place.insertAdjacentHTML("beforeend", html);
      if (atEnd) place.scrollTop = place.scrollHeight;
    } else {
      Idiomorph.morph(place, html, { morphStyle: "innerHTML", ignoreActiveValue: true, callbacks: keep });
    }
    htmx.process(place);
    place.dispatchEvent(new CustomEvent("gpuherd:updated", { bubbles: true }));
  }
  function close() {
    clearTimeout(again);
    if (source) source.close();
    source = null;
  }
  function lost() {
    say("The connection is lost; what is shown may be old. Trying again …");
    if (source && source.readyState === EventSource.CLOSED) {
      close();
      again = setTimeout(open, 5000);
    }
  }
  function open() {
    if (source || document.hidden) return;
    source = new EventSource(url);
    source.onopen = () => { say(""); document.body.dataset.connected = ""; };
    source.onerror = lost;
    source.onmessage = (event) => JSON.parse(event.data).forEach(put);
    source.addEventListener("gone", () => { close(); });
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();
})();
