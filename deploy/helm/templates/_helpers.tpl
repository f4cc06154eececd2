{{- define "ratchet.labels" -}}
app.kubernetes.io/name: ratchet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ratchet.environment" -}}
env:
  - {name: RATCHET_HOME, value: /var/lib/ratchet}
  - {name: TEMPORAL_ADDRESS, value: {{ .Values.temporal.address | quote }}}
  - {name: TEMPORAL_NAMESPACE, value: {{ .Values.temporal.namespace | quote }}}
  - {name: RAY_ADDRESS, value: "{{ .Release.Name }}-learner-head-svc:6379"}
  - {name: ADAPTER_PUBLIC_HOST, value: {{ required "adapterPublicHost: boxes need an address to call" .Values.adapterPublicHost | quote }}}
  - {name: ADAPTER_BIND_HOST, value: 0.0.0.0}
  - {name: ADAPTER_PORT, value: "18001"}
envFrom:
  - secretRef: {name: {{ .Values.secretName }}}
volumeMounts:
  - {name: state, mountPath: /var/lib/ratchet}
  - {name: memory, mountPath: /dev/shm}
{{- end }}

{{- define "ratchet.volumes" -}}
volumes:
  - name: state
    persistentVolumeClaim: {claimName: {{ .Values.stateClaim }}}
  - name: memory
    emptyDir: {medium: Memory}
{{- end }}
