// Keeps the end of a box in sight while its content grows, unless its reader has scrolled up.

import { useEffect, useRef } from "../vendor/preact.js";

/** Return {box, content, follows, scrolled}: two refs, whether the end is followed, and the handler of the box's scrolling.
 * The box scrolls after the layout of a frame, when its height is known: asking for it earlier would lay it out twice. */
export function useFollowEnd(slack) {
  const box = useRef(null);
  const content = useRef(null);
  const follows = useRef(true);
  const top = useRef(0);
  useEffect(() => {
    const observer = new ResizeObserver(() => {
      if (follows.current) box.current.scrollTop = box.current.scrollHeight;
    });
    observer.observe(content.current);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    if (scrollHeight - scrollTop - clientHeight < slack) follows.current = true;
    else if (scrollTop < top.current) follows.current = false;
    top.current = scrollTop;
  };
  return { box, content, follows, scrolled };
}
