"use strict";
// Drags a span over the hours of the calendar into the form, which reserves it. By touch a tap chooses one hour, so that
// a finger can still scroll. Without scripts, and by keyboard, the form does it alone.
(() => {
  const calendar = document.getElementById("calendar");
  const form = document.getElementById("reserve");
  let chosen = null; // [first, last] hours of the week, from 0
  let from = null; // the hour where a drag has begun
  const slot = (number) => calendar.querySelector(`.slot[data-slot="${number}"]`);
  function hourAt(event) {
    const cell = document.elementFromPoint(event.clientX, event.clientY)?.closest("td[data-slot]");
    if (!cell || !calendar.contains(cell)) return null;
    const rows = Number(cell.dataset.rows || 1);
    const box = cell.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    return Number(cell.dataset.slot) + Math.min(Math.max(row, 0), rows - 1);
  }
  function mark() {
    for (const cell of calendar.querySelectorAll("td.slot, td.lane")) {
      const number = Number(cell.dataset.slot);
      cell.classList.toggle("chosen", chosen !== null && number >= chosen[0] && number <= chosen[1]);
    }
  }
  function fill() {
    const first = slot(chosen[0])?.dataset.local;
    if (!first) return;
    form.elements.from.value = first;
    // Of the hour after the last one; of the week's last hour: midnight, by the calendar.
    let end = slot(chosen[1] + 1)?.dataset.local;
    if (!end) {
      const day = new Date(`${slot(chosen[1]).dataset.local.slice(0, 10)}T12:00`);
      day.setDate(day.getDate() + 1);
      const two = (number) => String(number).padStart(2, "0");
      end = `${day.getFullYear()}-${two(day.getMonth() + 1)}-${two(day.getDate())}T00:00`;
    }
    form.elements.until.value = end;
    form.scrollIntoView({ block: "nearest" });
    form.elements.gpus.focus({ preventScroll: true });
    form.elements.gpus.select();
  }
  function end(keeps) {
    from = null;
    if (!keeps) chosen = null;
    mark();
  }
  if (form) {
    calendar.addEventListener("pointerdown", (event) => {
      const cell = event.target.closest("td.slot, td.lane");
      if (!cell || event.button !== 0 || event.pointerType === "touch" || !slot(cell.dataset.slot)?.dataset.local) return;
      event.preventDefault();
      from = Number(cell.dataset.slot);
      chosen = [from, from];
      calendar.setPointerCapture(event.pointerId);
      mark();
    });
    calendar.addEventListener("pointermove", (event) => {
      if (from === null) return;
      const hour = hourAt(event);
      if (hour === null) return;
      const span = [Math.min(from, hour), Math.max(from, hour)];
      if (slot(span[0])?.dataset.local && slot(span[1])?.dataset.local) chosen = span;
      mark();
    });
    calendar.addEventListener("pointerup", () => {
      if (from === null) return;
      end(true);
      fill();
    });
    calendar.addEventListener("pointercancel", () => end(false));
    calendar.addEventListener("click", (event) => {
      const cell = event.target.closest("td.slot, td.lane");
      if (event.pointerType !== "touch" || !cell || !slot(cell.dataset.slot)?.dataset.local) return;
      chosen = [Number(cell.dataset.slot), Number(cell.dataset.slot)];
      mark();
      fill();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && chosen) end(false);
    });
    calendar.addEventListener("gpuherd:updated", mark);
  }
  document.addEventListener("submit", (event) => {
    const question = event.target.dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
  });
})();
