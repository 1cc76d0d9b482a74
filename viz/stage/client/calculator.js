// How large a KV cache is: the form of viz/calculator.py, computed again here while a reader types, by the same formula.
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

const cacheBytes = (s) => 2 * s.batch * s.layers * s.sequence * s.kv_heads * s.head_dim * s.bytes;

// Three significant digits, halves up, without zeros at the end: viz/calculator.py rounds the same way.
function threeDigits(value) {
  const places = value >= 100 ? 0 : value >= 10 ? 1 : 2, scaled = Math.floor(value * 10 ** places + 0.5);
  return thousands(scaled / 10 ** places, places);
}

function byteSize(bytes) {
  let value = bytes, unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${threeDigits(value)} ${UNITS[unit]}`;
}

function timesMemory(bytes, memory) {
  const value = bytes / memory, places = value >= 1 ? 1 : 2;
  return (Math.floor(value * 10 ** places + 0.5) / 10 ** places).toLocaleString("en-US", { minimumFractionDigits: places });
}

class Calculator {
  constructor(stage) {
    this.stage = stage;
    this.root = h("section", { class: "glass-calculator" });
    const seen = new ResizeObserver(() => { if (this.root.offsetWidth) { seen.disconnect(); this.load(); } }); // the drawer opened
    seen.observe(this.root);
    this.root.append(h("h2", { text: "KV cache" }));
  }

  async load() {
    const url = new URL("calculator", this.stage.base);
    url.searchParams.set("viewer", this.stage.link.viewer || "");
    url.searchParams.set("language", spoken);
    try {
      this.build(await (await fetch(url)).json());
    } catch { /* offline: the heading stays, the next opening of the drawer is a new page */ }
  }

  build(form) {
    this.form = form;
    this.inputs = {};
    const labels = form.fields.map((field) => {
      const input = field.name === "bytes"
        ? h("select", { class: "glass-select", onchange: () => this.show() }, ...form.widths.map((w) => h("option", { value: String(w.value), text: w.label })))
        : h("input", { type: "number", class: "glass-number", min: String(field.min), max: String(field.max), step: "1", oninput: () => this.show() });
      this.inputs[field.name] = input;
      return h("label", {}, h("span", { text: field.label }), input);
    });
    const presets = form.presets.map((p) => h("button", { type: "button", class: "glass-button glass-text", text: p.label, onclick: () => this.fill(p.values) }));
    this.total = h("p", { class: "glass-what" });
    this.compared = h("p", { class: "glass-detail" });
    const said = h("div", { role: "status" }, this.total, this.compared);
    this.root.replaceChildren(h("h2", { text: form.title }), h("p", { class: "glass-detail", text: form.formula }), ...labels, ...presets, said);
    this.fill(form.values);
  }

  fill(values) {
    for (const [name, input] of Object.entries(this.inputs)) input.value = String(values[name]);
    this.show();
  }

  // An empty or impossible field says nothing until it is right.
  shape() {
    const shape = {};
    for (const field of this.form.fields) {
      const value = Number(this.inputs[field.name].value);
      if (!(value >= field.min && value <= field.max) || (field.name !== "bytes" && !Number.isInteger(value))) return null;
      shape[field.name] = value;
    }
    return shape;
  }

  show() {
    const shape = this.shape(), { words, memory, device } = this.form;
    const bytes = shape && cacheBytes(shape);
    setText(this.total, shape ? fill(words.result, { product: [2, ...Object.values(shape)].map((n) => thousands(n, 1)).join(" × "), size: byteSize(bytes) }) : "—");
    const fields = shape && { size: byteSize(bytes), ratio: memory && timesMemory(bytes, memory), device, memory: memory && byteSize(memory) };
    setText(this.compared, !shape ? "" : memory ? fill(words.ratio, fields) : words.no_memory);
  }
}
