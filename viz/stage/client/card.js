// My request on a phone: where it is and why, in the place of the inspector's first lines. The selected request, or else
// the newest one that was sent from this page.
class Card {
  constructor(stage) {
    this.stage = stage;
    this.mine = null;
    this.letter = h("button", { type: "button", class: "glass-name", onclick: () => stage.select(stage.state.selection === this.item.id ? null : this.item.id) });
    this.said = h("p", { class: "glass-what" });
    this.why = h("p", { class: "glass-why" });
    this.root = h("section", { class: "glass-card", "aria-label": WORDS.myRequest, tabIndex: 0, hidden: true }, this.letter, h("div", {}, this.said, this.why));
  }

  show(row, why) {
    const { stage } = this, id = requestOf(stage.state.selection);
    this.item = row && ((id && row.items.find((item) => item.id === id)) || row.items.findLast((item) => item.request === this.mine));
    const hidden = !stage.phone || !this.item || stage.root.classList.contains("glass-embed");
    if (this.root.hidden !== hidden) { this.root.hidden = hidden; stage.sized(); }
    if (hidden) return;
    const { item } = this, chosen = why && requestOf(why.of) === item.id ? why.lines : [];
    setText(this.letter, short(item.name, 6));
    this.letter.setAttribute("aria-label", `${WORDS.requests}: ${item.name}`);
    this.letter.setAttribute("aria-pressed", String(id === item.id));
    identity(this.letter, item.slot);
    const reason = WORDS.why[item.why];
    setText(this.said, `${WORDS.state[item.state]}${reason && !chosen.length ? ": " + reason : ""}, ${WORDS.tokens(item.tokens)}`);
    setText(this.why, chosen.length ? chosen.join(" ") : item.prompt);
  }
}

// The request that a mark speaks of: "seq:3", "token:3:12" → "seq:3".
function requestOf(id) {
  const found = /^(?:seq|token|query):(\d+)/.exec(id || "");
  return found && `seq:${found[1]}`;
}
