// How it is decoded: controls that stand at the values of the model's recipe until somebody moves them.

const SLIDERS = ["temperature", "top_p", "stop_threshold"];
const SHARES = ["top_p", "stop_threshold"]; // told in per cent
const ORDERS = {
  auto: "the model decides",
  mass: "where most is missing",
  certainty: "where it is surest",
  margin: "where the choice is clearest",
  random: "any place, at random",
  left: "from left to right, fast and fluent",
};

export class Settings {
  constructor(form) {
    this.sliders = SLIDERS.map((name) => form.querySelector(`#${name}`));
    this.order = form.querySelector("#order");
    this.seed = form.querySelector("#seed");
    this.reset = form.querySelector("#reset");
    this.own = {};
    for (const slider of this.sliders) slider.addEventListener("input", () => this.#show());
    this.order.addEventListener("change", () => this.#show());
    this.reset.addEventListener("click", () => {
      this.asked = { seed: this.seed.valueAsNumber };
      this.reset.closest("details").querySelector("summary").focus();
    });
  }

  /** model: of /v1/models. What has been moved is kept where the new model knows it. */
  suit({ settings, orders }) {
    const before = this.asked;
    this.own = settings;
    for (const slider of this.sliders) {
      slider.closest(".setting").hidden = !(slider.id in settings);
      slider.max = Math.max(slider.defaultMax ??= Number(slider.max), settings[slider.id] ?? 0);
    }
    this.order.closest(".setting").hidden = !("order" in settings);
    const known = ["auto", ...orders].map((name) => new Option(ORDERS[name] ?? name, name));
    this.order.replaceChildren(...known);
    this.asked = before;
  }

  /** The fields of a request that these controls stand for: what is not the model's own. */
  get asked() {
    const asked = { seed: this.seed.valueAsNumber };
    for (const slider of this.sliders) if (this.#moved(slider)) asked[slider.id] = slider.valueAsNumber;
    if (this.#moved(this.order)) asked.order = this.order.value;
    return asked;
  }

  set asked(request) {
    const value = (name) => request[name] ?? this.own[name];
    for (const slider of this.sliders) if (slider.id in this.own) slider.value = value(slider.id);
    if ("order" in this.own) this.order.value = value("order");
    if (!this.order.value) this.order.value = this.own.order; // of another model
    this.seed.value = request.seed ?? 0;
    this.#show();
  }

  #moved(control) {
    if (!(control.id in this.own)) return false;
    const own = this.own[control.id];
    return control === this.order ? control.value !== own : Math.abs(control.valueAsNumber - own) > 0.005;
  }

  #show() {
    for (const slider of this.sliders) {
      const number = slider.valueAsNumber;
      const value = SHARES.includes(slider.id) ? `${Math.round(100 * number)} %` : number.toFixed(2);
      slider.closest(".setting").querySelector("output").textContent = value;
      slider.setAttribute("aria-valuetext", this.#moved(slider) ? value : `${value}, the model's own`);
    }
    this.reset.hidden = ![...this.sliders, this.order].some((control) => this.#moved(control));
  }
}
