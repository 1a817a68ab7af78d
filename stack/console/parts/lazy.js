// A view whose modules are loaded when it is opened for the first time.

import { html, useEffect, useState } from "../vendor/preact.js";
import { Skeleton } from "./states.js";

/** Return the view that `load` resolves to, as a view that shows itself once it is there. */
export function lazy(load) {
  let Loaded = null;
  return function Late(props) {
    const [, setVersion] = useState(0);
    const [isMissing, setMissing] = useState(false);
    useEffect(() => {
      if (Loaded) return undefined;
      let isWanted = true;
      load().then(
        (view) => {
          Loaded = view;
          if (isWanted) setVersion(1);
        },
        () => isWanted && setMissing(true),
      );
      return () => (isWanted = false);
    }, []);
    if (Loaded) return html`<${Loaded} ...${props} />`;
    // a module that could not be loaded is asked for again by a reload alone
    if (isMissing)
      return html`<div class="page"><div class="failure" role="alert"><b>This view could not be loaded. Is the server still running?</b><button onClick=${() => location.reload()}>Reload the page</button></div></div>`;
    return html`<div class="page"><${Skeleton} /></div>`;
  };
}
