// Numbers as people read them.

export function number(value, digits = 2) {
  return value === null ? "∞" : value.toFixed(digits).replace("-", "−");
}

export function signed(value, digits = 2) {
  return (value > 0 ? "+" : "") + number(value, digits);
}

export function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

export function byId(id) {
  return document.getElementById(id);
}

// An element with text in it. Text is never read as HTML.
export function element(tag, { text = "", name = "", ...attributes } = {}, children = []) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
