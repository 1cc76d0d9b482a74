// Small helpers: elements from safe text only, icons, numbers, one frame at a time.
const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  play: "M7 4.5v15l12-7.5z", pause: "M6.5 4.5h4v15h-4zM13.5 4.5h4v15h-4z",
  step: "M5 4.5v15l9.5-7.5zM16 4.5h3.2v15H16z", back: "M19 4.5v15L9.5 12zM8 4.5H4.8v15H8z",
  max: "M4 4h7v2.4H6.4V11H4zM20 20h-7v-2.4h4.6V13H20z", min: "M11 11H4V8.6h4.6V4H11zM13 13h7v2.4h-4.6V20H13z",
  close: "M6 4.4 12 10.4 18 4.4 19.6 6 13.6 12 19.6 18 18 19.6 12 13.6 6 19.6 4.4 18 10.4 12 4.4 6z",
  theme: "M12 3a9 9 0 1 0 0 18zM12 3v2a7 7 0 0 1 0 14v2a9 9 0 0 0 0-18z",
  drawer: "M3 4.5h18v15H3zM5.2 6.7v10.6h8.3V6.7z", save: "M10.8 3h2.4v9.2l3.5-3.4 1.6 1.7-6.3 6.2-6.3-6.2 1.6-1.7 3.5 3.4zM4 18.6h16V21H4z",
  open: "M13.2 17h-2.4V7.8l-3.5 3.4-1.6-1.7L12 3.3l6.3 6.2-1.6 1.7-3.5-3.4zM4 18.6h16V21H4z",
  help: "M12 2.5a9.5 9.5 0 1 0 0 19 9.5 9.5 0 0 0 0-19zm-1.2 14.3h2.4v2.4h-2.4zm2.4-2h-2.4c0-3.1 2.7-3.2 2.7-5 0-.9-.7-1.5-1.5-1.5-.9 0-1.6.6-1.6 1.7H8c0-2.5 1.7-4 4-4s4 1.5 4 3.7c0 2.6-2.8 3-2.8 5.1z",
  projector: "M3 4h18v12.5H3zm2.3 2.3v7.9h13.4V6.3zM8 18.6h8V21H8z",
  share: "M18 15.8a3 3 0 0 0-2.2 1L8.9 12.8a3 3 0 0 0 0-1.6l6.9-4a3 3 0 1 0-.9-1.8l-7.2 4.2a3 3 0 1 0 0 4.8l7.2 4.2a3 3 0 1 0 3.1-2.8z",
  people: "M9 4a4 4 0 1 1 0 8 4 4 0 0 1 0-8zM1.5 20c0-4 3.4-6.5 7.5-6.5s7.5 2.5 7.5 6.5zM16.2 4.6a3.6 3.6 0 1 1 0 6.9 6 6 0 0 0 0-6.9zM18.6 20c0-2.6-.9-4.7-2.5-6.2 3.7.1 6.4 2.6 6.4 6.2z",
  previous: "M15.5 4.5 8 12l7.5 7.5 1.7-1.7L11.4 12l5.8-5.8z", next: "M8.5 4.5 16 12l-7.5 7.5-1.7-1.7 5.8-5.8-5.8-5.8z",
  chapters: "M3 4h4v4H3zm6.5 1h11.5v2H9.5zM3 10h4v4H3zm6.5 1h11.5v2H9.5zM3 16h4v4H3zm6.5 1h11.5v2H9.5z", answer: "M4 4.5h16v11H9.5L5 20v-4.5H4zm3.5 3v2h9v-2zm0 3.4v2h6v-2z",
  more: "M3 10h4v4H3zm7 0h4v4h-4zm7 0h4v4h-4z", check: "M9.7 18.4 3.8 12.5l1.7-1.7 4.2 4.2 8.8-8.8 1.7 1.7z",
};

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") element.className = value;
    else if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && key !== "list" && typeof value !== "string") element[key] = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  path.setAttribute("fill-rule", "evenodd");
  svg.append(path);
  return svg;
}

function iconButton(name, label, onclick, extra = {}) {
  return h("button", { type: "button", class: "glass-button", "aria-label": label, title: label, onclick, ...extra }, icon(name));
}

function setIcon(button, name, label) {
  if (button.dataset.icon === name) return;
  button.dataset.icon = name;
  button.replaceChildren(icon(name));
  button.setAttribute("aria-label", label);
  button.title = label;
}

// Only touches the DOM when the text differs: most messages change a few words.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let magnified = 1; // how much larger than its layout the page is seen
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const thousands = (value, digits = 0) => Number(value).toLocaleString("en-US", { maximumFractionDigits: digits });
const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

function numberText(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100 || value === Math.round(value)) return thousands(Math.round(value));
  return size >= 0.001 ? String(+value.toPrecision(3)) : value === 0 ? "0" : value.toExponential(1);
}

// Runs `action` once on the next animation frame, however often it is asked.
function onFrame(action) {
  let asked = 0;
  const ask = () => { if (!asked) asked = requestAnimationFrame(() => { asked = 0; action(); }); };
  ask.cancel = () => { cancelAnimationFrame(asked); asked = 0; };
  return ask;
}

function later(action, ms) {
  let timer = 0;
  const ask = () => { clearTimeout(timer); timer = setTimeout(action, ms); };
  ask.cancel = () => clearTimeout(timer);
  return ask;
}

// A button's menu: closing gives the focus back, arrows and Home and End go round what is offered, Escape closes. Who
// extends it has `menu` and `button`, and opens it himself.
class Menu {
  toggle() { this.menu.hidden ? this.open() : this.close(); }

  close(back = true) {
    if (this.menu.hidden) return;
    this.menu.hidden = true;
    this.button.setAttribute("aria-expanded", "false");
    if (back) this.button.focus();
  }

  key(event) {
    const items = [...this.menu.children].filter((item) => !item.hidden), at = items.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (event.key === "Escape") this.close();
    else if (to === undefined) return;
    else items[(to + items.length) % items.length].focus();
    event.preventDefault();
    event.stopPropagation();
  }
}

const stored = {
  get(key) { try { return localStorage.getItem("glass." + key); } catch { return null; } },
  set(key, value) { try { localStorage.setItem("glass." + key, value); } catch { /* private window */ } },
};

// The same for this visit only.
const visited = {};
const visit = {
  get(key) { try { return sessionStorage.getItem("glass." + key); } catch { return visited[key] || null; } },
  set(key, value) { visited[key] = value; try { sessionStorage.setItem("glass." + key, value); } catch { /* a sandboxed frame */ } },
};
