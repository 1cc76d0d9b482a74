// Header, prompt and chips, caption, transport: plain elements that change only where a word changed.
const TIGHTEST = 7; // steps by which the header gives way; the style sheet says what each of them takes

class Header {
  constructor(stage) {
    this.stage = stage;
    this.title = h("h1", { class: "glass-title", text: "Glass Engine" });
    this.model = h("span", { class: "glass-model" });
    this.device = h("span", { class: "glass-device" });
    this.source = h("button", { type: "button", class: "glass-source", "data-state": "loading", onclick: () => stage.showSource() }, h("i"), h("span"));
    this.rate = h("span", { class: "glass-rate" });
    this.presets = h("select", { class: "glass-select", "aria-label": WORDS.examples, hidden: true, onchange: () => this.preset() });
    this.back = h("button", { type: "button", class: "glass-button glass-text glass-back", text: WORDS.backToLive, hidden: true, onclick: () => stage.command("live") });
    this.file = h("input", { type: "file", hidden: true, tabIndex: -1, "aria-label": WORDS.open, onchange: () => this.stage.openRecording(this.file) });
    this.open = this.tool("open", WORDS.open, () => this.file.click(), { hidden: true });
    this.language = h("select", { class: "glass-select glass-language", "aria-label": WORDS.language, onchange: () => stage.setLanguage(this.language.value) },
      ...Object.entries(LANGUAGES).map(([name, words]) => h("option", { value: name, lang: name, text: words["language.name"], selected: name === spoken })));
    this.minor = h("span", { class: "glass-minor", id: "glass-minor", onfocusout: (e) => { if (!this.minor.contains(e.relatedTarget) && e.relatedTarget !== this.more) this.showMore(false); }, onkeydown: (e) => this.escaped(e) },
      this.language, this.open, this.tool("theme", WORDS.theme, () => stage.toggleTheme()), this.tool("projector", `${WORDS.projector} (P)`, () => stage.toggleProjector(), { class: "glass-button glass-tool glass-online" }),
      this.tool("help", `${WORDS.help} (?)`, () => stage.help()));
    this.more = iconButton("more", WORDS.moreTools, () => this.showMore(), { class: "glass-button glass-others", "aria-expanded": "false", "aria-controls": "glass-minor", onkeydown: (e) => this.escaped(e) });
    this.drawer = iconButton("drawer", `${WORDS.inspector} (I)`, () => stage.toggleDrawer(), { "aria-expanded": "false" });
    this.tools = h("span", { class: "glass-tools" }, stage.share.button, this.file, this.more, this.minor, this.drawer);
    this.root = h("header", { class: "glass-header" }, h("span", { class: "glass-logo", "aria-hidden": "true" }), this.title, this.source, this.model, this.device, this.rate,
      h("span", { class: "glass-gap" }), ...stage.people.control(), this.back, stage.tour.button, this.presets, this.tools);
  }

  // One of the tools that go into the menu where the line is too short: there it has its words beside it.
  tool(name, label, act, extra = {}) {
    return h("button", { type: "button", class: "glass-button glass-tool", "aria-label": label, title: label, onclick: () => { this.showMore(false); act(); }, ...extra }, icon(name), h("span", { class: "glass-word", "aria-hidden": "true", text: label }));
  }

  showMore(open = !this.minor.classList.contains("glass-on")) {
    this.minor.classList.toggle("glass-on", open);
    this.more.setAttribute("aria-expanded", String(open));
  }

  escaped(event) {
    if (event.key !== "Escape" || !this.minor.classList.contains("glass-on")) return;
    this.showMore(false);
    this.more.focus();
    event.preventDefault();
    event.stopPropagation();
  }

  // One line whatever the width: what says least goes first, and is found in the menu or the inspector.
  fit() {
    const { root, stage } = this;
    const seen = [stage.root.clientWidth, stage.root.dataset.theme, stage.root.className.includes("glass-phone"), root.textContent, [...root.children, this.open].map((e) => e.hidden)].join();
    if (seen === this.fitted || !root.clientWidth) return;
    this.fitted = seen;
    for (let level = 0; level <= TIGHTEST; level++) {
      for (let i = 1; i <= TIGHTEST; i++) stage.root.classList.toggle(`glass-tight-${i}`, i <= level);
      if (!this.isCut) break;
    }
    if (!stage.root.classList.contains("glass-tight-1")) this.showMore(false);
  }

  get isCut() {
    const cut = (e) => e.offsetWidth > 0 && e.scrollWidth > e.clientWidth;
    return cut(this.root) || [this.model, this.device, this.source.lastChild].some(cut);
  }

  // What plays, and what is behind it: a recording hides an engine that loads, or one that waits for a sentence.
  saySource(status) {
    const { engine } = status, { stage } = this, share = Math.floor(100 * Number((status.progress || {}).fraction) || 0);
    const kind = !stage.online ? "offline" : status.state === "dead" ? "dead" : status.state === "loading" ? "loading" : status.live ? "live" : "recording";
    const behind = kind === "recording" && engine && engine.live && stage.online ? engine.state : "";
    const isReady = behind && !["loading", "dead"].includes(behind) && stage.isIntro;
    this.source.dataset.state = isReady ? "ready" : kind;
    setText(this.source.lastChild, isReady ? WORDS.source.ready : behind !== "loading" ? WORDS.source[kind] : share > 0 ? WORDS.source.behindAt(share) : WORDS.source.behind);
    const title = [status.device, status.badge].filter(Boolean).join(" · ");
    if (this.source.title !== title) this.source.title = title;
  }

  preset() {
    const name = this.presets.value;
    this.presets.value = "";
    if (name) this.stage.preset(name);
  }

  show(status) {
    setText(this.model, (status.model && status.model.name) || "");
    setText(this.device, status.device || "");
    this.model.title = this.model.textContent;
    this.device.title = this.device.textContent;
    this.saySource(status);
    setText(this.rate, status.tokens_per_s > 0 ? `${numberText(status.tokens_per_s)} ${WORDS.perSec}` : "");
    const presets = status.presets || [];
    const names = JSON.stringify(presets);
    if (names !== this.names) {
      this.names = names;
      this.presets.hidden = !presets.length;
      this.presets.replaceChildren(h("option", { value: "", text: WORDS.examples }), ...presets.map((p) => h("option", { value: p.name, text: named(`preset.${p.name}.title`, p.title || p.name) })));
    }
    const recording = status.recording || {};
    this.open.hidden = !recording.open;
    this.back.hidden = !recording.back || this.stage.isIntro;
    this.fit();
  }
}

const INVITE_AFTER = 10000; // milliseconds after the page began

class PromptBar {
  constructor(stage) {
    this.stage = stage;
    this.input = h("input", { class: "glass-input", type: "text", autocomplete: "off", spellcheck: false, placeholder: WORDS.prompt, "aria-label": WORDS.prompt });
    this.send = h("button", { type: "submit", class: "glass-button glass-primary", text: WORDS.send });
    this.form = h("form", { class: "glass-form", onsubmit: (e) => { e.preventDefault(); this.submit(); } }, this.input, this.send);
    this.chips = h("div", { class: "glass-chips", role: "group", "aria-label": WORDS.requests });
    this.inviteText = h("span", { role: "status" });
    this.invite = h("div", { class: "glass-invite", hidden: true }, this.inviteText, iconButton("close", WORDS.dismiss, () => this.uninvite()));
    this.root = h("div", { class: "glass-prompt" }, this.form, this.invite, this.chips);
    this.made = [];
    this.input.addEventListener("input", () => this.uninvite());
  }

  // Once a visit, to somebody who only looks on: what typing would do.
  showInvite(status) {
    const asks = this.stage.isIntro && Boolean(status.engine && status.engine.live && status.engine.state !== "dead") && !this.stage.tour.told;
    const due = asks && !this.input.value && !visit.get("invited") && performance.now() - this.stage.begun >= INVITE_AFTER;
    if (this.invite.hidden === !due) return;
    this.invite.hidden = !due;
    setText(this.inviteText, due ? WORDS.invite : "");
  }

  uninvite() {
    if (this.stage.isIntro) visit.set("invited", "1");
    this.invite.hidden = true;
  }

  async submit() {
    const text = this.input.value;
    if (!text.trim()) return this.input.focus();
    this.input.value = "";
    this.uninvite();
    const reply = await this.stage.command("prompt", { text, ...this.stage.sampling });
    if (!reply.ok && !this.input.value) this.input.value = text;
    if (reply.ok && reply.request_id !== undefined) this.stage.card.mine = reply.request_id;
    if (reply.ok && reply.queued && reply.name && !reply.sentence) this.stage.tellNotice(WORDS.queuedAs(reply.name), false);
  }

  hint(text) { if (this.input.placeholder !== text) this.input.placeholder = text; }

  // Chips are reused in place, so that a click never lands on an element that was just replaced.
  show(row) {
    const { items, more } = row;
    while (this.made.length < items.length) this.made.push(this.chip());
    this.made.forEach((chip, i) => {
      chip.root.hidden = i >= items.length;
      if (i < items.length) this.fill(chip, items[i]);
    });
    if (!this.more) this.chips.append((this.more = h("span", { class: "glass-more" })));
    setText(this.more, more ? WORDS.more(more) : "");
    this.items = items;
  }

  chip() {
    const chip = { letter: h("b"), state: h("span"), bar: h("i") };
    chip.root = h("button", { type: "button", class: "glass-chip", onclick: () => this.stage.select(this.stage.state.selection === chip.item.id ? null : chip.item.id) }, chip.letter, chip.state, chip.bar);
    this.more ? this.chips.insertBefore(chip.root, this.more) : this.chips.append(chip.root);
    return chip;
  }

  fill(chip, item) {
    chip.item = item;
    const { root } = chip;
    if (root.dataset.state !== item.state) root.dataset.state = item.state;
    identity(root, item.slot);
    setText(chip.letter, short(item.name, 6));
    const prefill = item.state === "prefill";
    const words = prefill ? `${thousands(item.done)}/${thousands(item.of)}` : item.state === "decode" ? `${thousands(item.tokens)}/${thousands(item.max)}` : item.state === "finished" ? "✓" : WORDS.state[item.state];
    setText(chip.state, words);
    const share = prefill ? item.done / Math.max(item.of, 1) : item.state === "decode" ? item.tokens / Math.max(item.max, 1) : 0;
    chip.bar.style.width = `${Math.round(100 * clamp(share, 0, 1))}%`;
    const chosen = String(this.stage.state.selection === item.id);
    if (root.getAttribute("aria-pressed") !== chosen) root.setAttribute("aria-pressed", chosen);
    const label = `${item.name}: ${WORDS.state[item.state]}${item.why && WORDS.why[item.why] ? ", " + WORDS.why[item.why] : ""}, ${WORDS.tokens(item.tokens)}`;
    if (root.title !== label) { root.title = label; root.setAttribute("aria-label", label); }
  }
}

// The request's hue as three CSS variables: fill, text on it, outline.
function identity(element, slot) {
  const color = slot === null || slot === undefined ? "request-other" : `request-${slot % 6}`;
  if (element.dataset.color === color) return;
  element.dataset.color = color;
  element.style.setProperty("--chip", `var(--g-${color})`);
  element.style.setProperty("--chip-on", `var(--g-on-${color})`);
  element.style.setProperty("--chip-line", `var(--g-${color}-line)`);
}

class Caption {
  constructor() {
    this.text = h("span", { class: "glass-sentence" });
    this.live = h("span", { class: "glass-hidden", "aria-live": "polite" });
    this.root = h("div", { class: "glass-caption" }, this.text, this.live);
    this.at = 0;
    this.timer = 0;
  }

  // Seen at once; spoken at most every three seconds, and never while the engine runs freely.
  show(text, silent) {
    setText(this.text, text);
    if (this.text.title !== text) this.text.title = text;
    clearTimeout(this.timer);
    if (silent) return;
    const say = () => { this.at = performance.now(); setText(this.live, text); };
    const wait = this.at + 3000 - performance.now();
    if (wait <= 0) say(); else this.timer = setTimeout(say, wait);
  }

  destroy() { clearTimeout(this.timer); }
}

const PACES = [0.5, 1, 2, 4, 8, 16, 32];

class Transport {
  constructor(stage) {
    this.stage = stage;
    this.back = iconButton("back", WORDS.back, () => stage.back());
    this.play = h("button", { type: "button", class: "glass-button glass-play", onclick: () => stage.playPause() });
    setIcon(this.play, "play", WORDS.play);
    this.step = iconButton("step", WORDS.step, () => stage.forward());
    this.live = h("button", { type: "button", class: "glass-button glass-live", "aria-label": WORDS.live, onclick: () => stage.goLive() }, h("i"), h("span", { text: WORDS.live }));
    this.pace = h("select", { class: "glass-select glass-pace", "aria-label": WORDS.pace, onchange: () => stage.command("pace", { value: this.pace.value === "free" ? null : Number(this.pace.value) }) });
    this.pace.append(...PACES.map((n) => h("option", { value: String(n), text: WORDS.perSecond(n) })), h("option", { value: "free", text: WORDS.free }));
    this.scrubber = new Scrubber(stage);
    this.count = h("span", { class: "glass-count", text: WORDS.noStep });
    this.progress = h("span", { class: "glass-progress", hidden: true }, h("i"), h("span"));
    this.root = h("div", { class: "glass-transport", role: "group", "aria-label": WORDS.transport }, this.back, this.play, this.step, this.live, this.pace, this.scrubber.root, this.progress, this.count);
  }

  show(status, at) {
    const running = status.state === "running";
    setIcon(this.play, running && at.following ? "pause" : "play", running && at.following ? WORDS.pause : WORDS.play);
    this.live.classList.toggle("glass-on", Boolean(at.following));
    this.live.setAttribute("aria-pressed", String(Boolean(at.following)));
    const value = status.pace === null || status.pace === undefined ? "free" : String(status.pace);
    if (this.shownPace !== value) {
      this.shownPace = value;
      if (value !== "free" && ![...this.pace.options].some((o) => o.value === value)) this.pace.append(h("option", { value, text: WORDS.perSecond(Number(value)) }));
      this.pace.value = value;
    }
    setText(this.count, at.step === null || at.step === undefined ? WORDS.noStep : WORDS.stepOf(thousands(at.step), thousands(at.last)));
    this.scrubber.show(at);
    this.showProgress(status.progress);
  }

  // Here it covers nothing: the scrubber gives way.
  showProgress(progress) {
    this.progress.hidden = !progress;
    if (!progress) return;
    this.progress.firstChild.style.width = `${100 * clamp(Number(progress.fraction) || 0, 0.02, 1)}%`;
    setText(this.progress.lastChild, phrase(progress.text || WORDS.loading, "progress"));
    this.progress.title = this.progress.lastChild.textContent;
  }
}
