// One tab stop for many things: the arrow keys go through them, Home and End to the ends.
const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

export function roving(list, { size, first, pick }) {
  let place = null;
  const go = (to) => {
    place = Math.min(Math.max(to, 0), size() - 1);
    pick(place);
  };
  list.addEventListener("keydown", (event) => {
    const { key } = event;
    if (!size() || event.ctrlKey || event.altKey || event.metaKey) return;
    if (!(key in STEPS) && key !== "Home" && key !== "End") return;
    event.preventDefault();
    if (key === "Home") go(0);
    else if (key === "End") go(size() - 1);
    else go((place ?? first()) + (place === null ? 0 : STEPS[key]));
  });
  list.addEventListener("focus", () => {
    if (size() && place === null && list.matches(":focus-visible")) go(first());
  });
  return {
    go,
    at: (to) => (place = to), // null: nothing is picked
  };
}
