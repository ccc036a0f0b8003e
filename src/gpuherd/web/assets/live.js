"use strict";
// Puts what the server sends of a page that is open into it. Each event is a list of {id, html, how}: new content of the
// element with this id. A browser opens only six connections to a host, however many tabs there are: a hidden tab lets
// its own go, and of those that are in sight four follow the page all the time; the others look in every ten seconds.
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
      // Of a button that has the focus the words change, of a field that is being written in they don't.
      const writes = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName);
      Idiomorph.morph(place, html, { morphStyle: "innerHTML", ignoreActiveValue: writes, callbacks: keep });
    }
    htmx.process(place);
    place.dispatchEvent(new CustomEvent("gpuherd:updated", { bubbles: true }));
  }
  const FOLLOWERS = 4, LOOK_IN_MS = 10000, RETRY_MS = 5000;
  let follows = false;
  let leave = null;
  let claiming = false;
  // Takes a place among the tabs that follow, if there is one: a lock that all tabs of this browser see.
  function claim(number = 0) {
    return new Promise((known) => {
      navigator.locks.request(`gpuherd-live-${number}`, { ifAvailable: true }, (lock) => {
        if (lock) {
          follows = true;
          known();
          return new Promise((left) => { leave = left; });
        }
        if (number + 1 < FOLLOWERS) claim(number + 1).then(known);
        else known();
      });
    });
  }
  function close() {
    clearTimeout(again);
    if (source) source.close();
    source = null;
    if (leave) leave();
    leave = null;
    follows = false;
  }
  function closeFor(ms) {
    close();
    again = setTimeout(open, ms);
  }
  function lost() {
    say("The connection is lost; what is shown may be old. Trying again …");
    if (source && source.readyState === EventSource.CLOSED) closeFor(RETRY_MS);
  }
  async function open() {
    if (source || claiming || document.hidden) return;
    // Without TLS a browser has locks for pages of its own machine alone.
    claiming = true;
    if (navigator.locks) await claim();
    else follows = true;
    claiming = false;
    if (document.hidden) { close(); return; }
    source = new EventSource(url);
    source.onopen = () => { say(""); document.body.dataset.connected = follows ? "follows" : "looks in"; };
    source.onerror = lost;
    source.onmessage = (event) => {
      JSON.parse(event.data).forEach(put);
      if (!follows) closeFor(LOOK_IN_MS);
    };
    source.addEventListener("gone", close);
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();
})();
